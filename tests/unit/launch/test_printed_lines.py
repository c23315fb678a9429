"""What the user reads of what ranks print, as tables: tags on the way, prefixes, tracebacks, files."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from ring_notebook.launch.printed_lines import RankFiles, RankOutput, Style, cause_of
from ring_notebook.launch.supervisor.tagged_output import SHARED, pieces, put, tagged, untagged

TRACEBACK = b"""\
Traceback (most recent call last):
  File "%s/train.py", line 14, in <module>
    x()
  File "%s/select.py", line 3, in x
ValueError: no luck
""" % (os.getcwd().encode(), str(Path(os.__file__).parent).encode())


@pytest.mark.parametrize(
    "printed",
    [
        b"",
        b"one\n",
        b"one\ntwo",
        b"\n\n",
        b"\x1d",
        b"\x1d1:\n",
        b"a\x1d.b\n\x1d",
        b"\r 10%\r 20%",
        b"x" * 10_000 + b"\n",
    ],
    ids=lambda printed: repr(printed[:9]),
)
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_tags_go_on_and_come_off(printed: bytes, step: int) -> None:
    """In whatever pieces a stream arrives, each byte has its rank."""
    stream, kept, writer, got = tagged(3, printed), b"", SHARED, []
    for at in range(0, len(stream), step):
        found, writer, kept = untagged(kept + stream[at : at + step], writer, 4)
        got += found
    assert b"".join(text for _, text in got) + kept == printed
    assert {rank for rank, _ in got} <= {3}


def test_pieces_of_a_long_line_keep_their_tags() -> None:
    """A pipe takes so many bytes as one; another rank may write between two such pieces."""
    parts = list(pieces(tagged(3, b"x" * 10_000 + b"\n" + b"y\n")))
    assert all(len(part) <= select.PIPE_BUF and part.startswith(b"\x1d3:") for part in parts)


def test_a_slow_reader_gets_all_from_a_pipe_that_does_not_block() -> None:
    """Which another program has set so, for all that share it."""
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    code = "import sys; sys.stdin.buffer.read(1); print(1 + len(sys.stdin.buffer.read()))"
    with subprocess.Popen([sys.executable, "-c", code], stdin=source, stdout=subprocess.PIPE) as reader:
        os.close(source)
        try:
            put(sink, b"a line\n" * 100_000)
        finally:
            os.close(sink)
        assert reader.communicate()[0] == b"700000\n"


def test_what_no_rank_has_printed_is_nobodys() -> None:
    stream = tagged(0, b"one\n") + b"ringrun: two\n" + tagged(9, b"three\n")
    assert untagged(stream, SHARED, 2) == (
        [(0, b"one\n"), (SHARED, b"ringrun: two\n"), (SHARED, b"three\n")],
        SHARED,
        b"",
    )


@pytest.mark.parametrize(
    ("style", "shown"),
    [
        (Style(2), b"[0] a\n[1] b\n[0] c\nringrun: d\n"),
        (Style(1), b"a\nb\nc\nringrun: d\n"),
        (Style(2, prefix=False), b"a\nb\nc\nringrun: d\n"),
        (Style(1, most=2), b"[0] a\n[0] b\n[0] c\nringrun: d\n"),
        (Style(11), b"[ 0] a\n[ 1] b\n[ 0] c\nringrun: d\n"),
        (Style(2, colour=True), b"\x1b[36m[0]\x1b[0m a\n\x1b[33m[1]\x1b[0m b\n\x1b[36m[0]\x1b[0m c\nringrun: d\n"),
    ],
    ids=["two", "one", "none", "grows", "eleven", "colours"],
)
def test_each_line_says_whose_it_is(style: Style, shown: bytes) -> None:
    output = RankOutput(style, "stdout")
    stream = [tagged(0, b"a\n"), tagged(min(1, style.ranks - 1), b"b\n"), tagged(0, b"c\n"), b"ringrun: d\n"]
    assert b"".join(map(output.feed, stream)) + output.close() == shown


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ([(0, b"what? "), (0, b"more\n")], b"[0] what? more\n"),
        ([(0, b"what? "), (1, b"b\n"), (0, b"more\n")], b"[0] what? \n[1] b\n[0] more\n"),
        ([(0, b"\r 10%"), (0, b"\r 20%\n")], b"\r[0]  10%\r[0]  20%\n"),
        ([(0, b"a\r\n")], b"[0] a\r\n"),
    ],
)
def test_unfinished_lines(printed: list[tuple[int, bytes]], shown: bytes) -> None:
    output = RankOutput(Style(2), "stdout")
    assert b"".join(output.feed(tagged(*piece)) for piece in printed) + output.close() == shown


def test_a_traceback_comes_in_one_piece() -> None:
    output = RankOutput(Style(2, prefix=False), "stderr")
    lines = TRACEBACK.splitlines(keepends=True)
    shown = b"".join(output.feed(tagged(0, line) + tagged(1, b"- " + line)) for line in lines)
    assert TRACEBACK in shown
    assert output.causes == {0: "ValueError: no luck at train.py:14"}
    assert output.feed(tagged(0, lines[0])) == b""
    assert output.close() == lines[0], "what ends in the middle is shown"


def test_the_cause_is_what_a_callback_raised() -> None:
    """JAX's and TensorFlow's errors hold the traceback of the callback."""
    output = RankOutput(Style(2, prefix=False), "stderr")
    within = b"""Traceback (most recent call last):
  File "train.py", line 11, in <module>
    step(x)
jax.errors.JaxRuntimeError: INTERNAL: error calling callback: Traceback (most recent call last):
  File "train.py", line 11, in <module>
  File "train.py", line 6, in augment
ValueError: no such image
--------------------
"""
    shown = b"".join(output.feed(tagged(0, line)) for line in within.splitlines(keepends=True))
    assert shown == within
    assert output.causes == {0: "ValueError: no such image at train.py:6"}


GROUPS = """
def fails(number):
    raise ValueError(f"no luck {number}")
def collect(*calls, name="tasks"):
    found = []
    for call in calls:
        try:
            call()
        except Exception as error:
            found.append(error)
    raise ExceptionGroup(name, found)
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="this Python has no exception groups")
@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("collect(lambda: fails(1))", "ValueError: no luck 1 at {}:3, in ExceptionGroup: tasks (1 sub-exception)"),
        (
            "collect(lambda: collect(lambda: fails(1), lambda: fails(2), name='inner'), lambda: fails(3))",
            "ValueError: no luck 1 at {}:3, in ExceptionGroup: tasks (2 sub-exceptions)",
        ),
        (
            "raise ExceptionGroup('many', [OSError(number) for number in range(40)])",
            "OSError: 0, in ExceptionGroup: many (40 sub-exceptions)",
        ),
        ("try: fails(1)\nexcept ValueError: collect(lambda: fails(2))", "ValueError: no luck 2 at {}:3, in Exc"),
    ],
    ids=["one", "nested", "never-raised", "while-another"],
)
def test_an_exception_group_comes_in_one_piece(line: str, cause: str, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(GROUPS + line)
    said = subprocess.run([sys.executable, program], capture_output=True, check=False).stderr
    output = RankOutput(Style(2, prefix=False), "stderr")
    lines = said.splitlines(keepends=True)
    shown = b"".join(output.feed(tagged(0, line) + tagged(1, b"- " + line)) for line in [*lines, b"and on\n"])
    assert said[max(0, said.find(b"  + Exception Group")) :] in shown
    assert shown.endswith(b"and on\n- and on\n")
    assert output.causes[0].startswith(cause.format(program))


@pytest.mark.parametrize(
    ("traceback", "cause"),
    [
        (
            TRACEBACK.replace(b"train.py", b"train.py\x1b[0m").replace(b"ValueError", b"\x1b[1;35mValueError\x1b[0m"),
            "ValueError: no luck at train.py:14",  # as Python 3.13 prints with FORCE_COLOR
        ),
        (
            b"Traceback (most recent call last):\n  File \"/x/a.py\", line 2, in f\nKeyError: 'k'\n",
            "KeyError: 'k' at /x/a.py:2",
        ),
        (b'Traceback (most recent call last):\n  File "/x/a.py", line 2, in f\n', ""),
        (b"Traceback (most recent call last):\n", ""),
    ],
)
def test_the_cause_in_one_line(traceback: bytes, cause: str) -> None:
    assert cause_of(traceback) == cause


def test_files_of_ranks(tmp_path: Path) -> None:
    files = RankFiles(tmp_path, 11)
    output = RankOutput(Style(11, most=12), "stdout", files)
    output.feed(tagged(3, b"a\n") + b"ringrun: b\n" + tagged(11, b"joined\n") + tagged(10, b"c"))
    files.close()
    assert {
        path.relative_to(tmp_path).as_posix(): path.read_bytes()
        for path in tmp_path.rglob("std*")
        if path.stat().st_size
    } == {
        "rank.03/stdout": b"a\n",
        "rank.10/stdout": b"c",
        "rank.11/stdout": b"joined\n",
    }
