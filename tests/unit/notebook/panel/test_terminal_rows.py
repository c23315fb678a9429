"""What a terminal shows of a stream, as literal rows."""

from __future__ import annotations

import pytest

from ring_notebook.notebook.panel.labelled_lines import TerminalRows


@pytest.mark.parametrize(
    ("stream", "shown"),
    [
        ("plain", ["plain"]),
        ("two\nrows", ["two", "rows"]),
        ("windows\r\n", ["windows"]),
        ("loading\rdone", ["doneing"]),
        ("loading\r\x1b[Kdone", ["done"]),
        ("typo\x08e", ["type"]),
        ("a\nb\x1b[A1", ["a1", "b"]),
        ("a\nb\x1b[A\x1b[2Kc", [" c", "b"]),
        ("a\x1b[Bb", ["a", " b"]),
        ("ab\x1b[1Gc", ["cb"]),
        ("a\x1b[3Cb", ["a   b"]),
        ("\x1b[1;31mred\x1b[0m", ["red"]),
        ("\x1b[?25lhidden cursor\x1b[?25h", ["hidden cursor"]),
        ("\x1b[9Aabove the first row", ["above the first row"]),
        ("\x1b[999999999Bfar", [""] * 100 + ["far"]),
    ],
)
def test_rows_as_a_terminal_shows_them(stream: str, shown: list[str]) -> None:
    whole, parts = TerminalRows(), TerminalRows()
    whole.write(stream)
    for character in stream:  # a control sequence may be cut anywhere
        parts.write(character)
    assert whole.open == parts.open == shown


def test_rows_above_the_cursor_are_complete() -> None:
    rows = TerminalRows()
    rows.write("a\nb\nc")
    assert rows.settle() == ["a", "b"]
    assert rows.open == ["c"]
    assert rows.settle(last=True) == ["c"]
    assert rows.open == []


def test_rows_of_a_stream_that_goes_up_wait_for_a_call() -> None:
    rows = TerminalRows()
    rows.write("bar\n\x1b[A")
    assert rows.settle() == []
    rows.write("\n")
    assert rows.settle() == []
    rows.write("\x1b[Arab\n")
    assert rows.settle() == [], "the cursor was above meanwhile"
    assert rows.settle() == ["rab"]
