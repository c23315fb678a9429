"""What faulthandler writes as frames, and frames as text."""

from __future__ import annotations

from ring_notebook.notebook.cluster.stacks import Frame, Stack, parse, render

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
    text = render([Stack(0, FRAMES), Stack(1), Stack(2, FRAMES), Stack(3, trouble="is gone")], {"r1": (source, 1)})
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
    text = render(found, {"r0": ("%%ringtrain\none()", 1), "r1": ("two()", 2)})
    assert [line.strip() for line in text.splitlines() if not line.startswith("rank")] == [
        *("Cell, line 2, in <module>", "one()"),
        *("Cell, line 2, in <module>", "two()"),
        "Cell, line 2, in <module>",
    ]
