"""What faulthandler and the core write as frames of interest to a user, and frames as text."""

from __future__ import annotations

from pathlib import Path

from ring_notebook.notebook.cluster.stacks import Frame, NativeFrame, Stack, parse, parse_native, render
from ring_notebook.notebook.record.run_record import RunRecord

WRITTEN = """a line that the cell has printed
Stack (most recent call first):
  File "/lib/socket.py", line 9 in recv
  File "<cell of run r1>", line 4 in load
  File "<cell of run r1>", line 6 in <module>
  File "/engine/runner.py", line 70 in execute
  File "/ring_notebook/engine/engine_program.py", line 30 in <module>
"""
FRAMES = (
    Frame("<cell of run r1>", 6, "<module>"),
    Frame("<cell of run r1>", 4, "load"),
    Frame("/lib/socket.py", 9, "recv"),
)


def cell(run: str, source: str, **options: int) -> RunRecord:
    about = {"run": run, "name": "", "size": 1, "source": source, "options": options, "environment": {}, "started": 0}
    return RunRecord(Path(), about)


def test_the_frames_from_the_cell_inward() -> None:
    assert parse(WRITTEN) == FRAMES


def test_an_unfinished_dump_is_told_from_a_rank_in_no_cell() -> None:
    head = "Stack (most recent call first):\n"
    assert parse(head + '  File "/loop.py", line 1 in run\n  File "/engine_program.py", line 1 in <module>\n') == ()
    for end in range(len(WRITTEN) - 2):
        assert parse(WRITTEN[:end]) is None


def test_of_a_stack_that_is_too_deep_the_inner_calls() -> None:
    text = "Stack (most recent call first):\n" + '  File "/deep.py", line 3 in f\n' * 100 + "  ...\n"
    assert parse(text) == (Frame("/deep.py", 3, "f"),) * 100


def test_equal_places_are_shown_once_with_the_lines_of_the_cell() -> None:
    source = "import socket\n\ndef load():\n    receive()\n\nload()\n"
    text = render([Stack(0, FRAMES), Stack(1), Stack(2, FRAMES), Stack(3, trouble="is gone")], [cell("r1", source)])
    assert text == (
        "ranks 0, 2:\n"
        "    Cell, line 6, in <module>\n      load()\n"
        "    Cell, line 4, in load\n      receive()\n"
        "    /lib/socket.py, line 9, in recv\n"
        "rank 1: idle\n"
        "rank 3: is gone"
    )


def test_ranks_in_different_runs_show_their_own_cells() -> None:
    found = [Stack(rank, (Frame(f"<cell of run r{rank}>", 2, "<module>"),)) for rank in range(3)]
    text = render(found, [cell("r0", "%%ringtrain\none()"), cell("r1", "two()", first_line=2)])
    assert [line.strip() for line in text.splitlines() if not line.startswith("rank")] == [
        *("Cell, line 2, in <module>", "one()"),
        *("Cell, line 2, in <module>", "two()"),
        "Cell, line 2, in <module>",
    ]


NATIVE = """a line that the cell has printed
Native stack (most recent call first):
  clock_nanosleep of /lib/x86_64-linux-gnu/libc.so.6
  sleep of /lib/x86_64-linux-gnu/libc.so.6
  +0x1f3a of /usr/lib of ours/libffi.so.8
  +0x22 of /usr/lib of ours/libffi.so.8
  std::vector<int> sum(long) of /usr/lib of ours/libffi.so.8
  +0x33 of /usr/bin/python3
  long_pow of /usr/bin/python3
  _PyObject_MakeTpCall of /usr/bin/python3
  PyObject_Vectorcall of /usr/bin/python3
  _PyEval_EvalFrameDefault of /usr/bin/python3
  sleep of /outside.so
End of native stack
"""


def test_calls_within_the_innermost_of_python() -> None:
    assert parse_native(NATIVE) == (
        NativeFrame("long_pow", "python3"),
        NativeFrame("std::vector<int> sum(long)", "libffi.so.8"),
        NativeFrame("+0x1f3a", "libffi.so.8"),
        NativeFrame("sleep", "libc.so.6"),
        NativeFrame("clock_nanosleep", "libc.so.6"),
    )


def test_an_unfinished_native_stack_is_told_from_python_alone() -> None:
    lines = NATIVE.splitlines(keepends=True)
    for end in range(len(lines)):
        assert parse_native("".join(lines[:end])) is None
    assert parse_native(lines[1] + "  _PyEval_EvalFrameDefault of /usr/bin/python3\n" + lines[-1]) == ()


def test_what_cannot_be_followed_to_python_is_shown_as_far_as_it_goes() -> None:
    assert parse_native("Native stack (most recent call first):\n  ? of ?\nEnd of native stack\n") == (
        NativeFrame("?", "?"),
    )


def test_long_names_are_cut() -> None:
    frame = NativeFrame("f", "a.so")
    assert str(frame) == "native, in f of a.so"
    written = f"Native stack (most recent call first):\n  {'f' * 500} of /a.so\nEnd of native stack\n"
    (cut,) = parse_native(written) or ()
    assert cut.function == "f" * 119 + "…"
