"""Output of many ranks as labelled lines, and what a terminal shows of a stream, as literal rows."""

import pytest

from ring_notebook.notebook.panel.labelled_lines import (
    LONGEST,
    Line,
    Lines,
    TerminalRows,
    count,
    html,
    split_last,
    text,
)
from ring_notebook.notebook.record.run_view import Printed


def out(number: int, rank: int, said: str, stream: str = "stdout") -> Printed:
    return Printed(number, rank, stream, said)


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (
            [out(1, 0, "epoch 1\na\n"), out(2, 2, "epoch 1\n"), out(3, 1, "epoch 1\nb\n")],
            "[0-2] epoch 1\n[0] a\n[1] b\n",
        ),
        ([out(1, 0, "x\nx\n"), out(2, 1, "x\n")], "[0-1] x\n[0] x\n"),  # what one rank repeats is kept
        ([out(1, 0, "a\n"), out(2, 0, "b\n", "stderr"), out(3, 0, "c\n")], "[0] a\n[0] b\n[0] c\n"),
        ([out(1, 3, "no newline")], "[3] no newline\n"),
        ([out(1, 0, "a\r\n")], "[0] a\n"),
    ],
)
def test_equal_lines_of_several_ranks_become_one(pieces: list[Printed], shown: str) -> None:
    assert text(Lines().take(pieces, last=True)) == shown


def test_lines_of_one_print_stay_together_and_join_as_a_whole() -> None:
    def block(number: int, rank: int, said: str) -> Printed:
        return Printed(number, rank, "stdout", said, block=True)

    pieces = [block(1, 1, "[[1],\n [2]]\n"), block(2, 0, "[[1],\n [3]]\n"), block(3, 2, "[[1],\n [2]]\n")]
    lines = Lines().take(pieces)
    assert text(lines) == "[0] [[1],\n     [3]]\n[1-2] [[1],\n       [2]]\n"
    assert "white-space:pre" in html(lines)


def test_lines_that_arrive_together_are_in_the_order_of_the_ranks() -> None:
    lines = Lines()
    first = [out(1, 2, "a2\nb2\n"), out(2, 0, "a0\nb0\nc0\n"), out(3, 1, "a1\n")]
    assert text(lines.take(first)) == "[0] a0\n[1] a1\n[2] a2\n[0] b0\n[2] b2\n[0] c0\n"
    assert text(lines.take([*first, out(4, 1, "later\n"), out(5, 1, "last\n"), out(6, 0, "other\n")])) == (
        "[0] other\n[1] later\n[1] last\n"
    )


def test_the_last_lines_are_divided_from_those_before_without_cutting_a_print() -> None:
    lines = [Line((0,), "stdout", said) for said in ["a", "b\nc", "d", "e"]]
    assert count(lines) == 5
    assert split_last(lines, 2) == (lines[:2], lines[2:])
    assert split_last(lines, 3) == (lines[:2], lines[2:])
    assert split_last(lines, 4) == (lines[:1], lines[1:])
    assert split_last(lines, 9) == ([], lines)
    assert split_last(lines[:2], 1) == (lines[:1], lines[1:2])
    assert split_last([], 3) == ([], [])


def test_a_place_in_the_cell_is_named_as_the_notebook_does() -> None:
    warned = Line((0,), "stderr", "<cell of run 2026-a1>:19: UserWarning: slow\n  f(x)")
    raised = Line((1,), "stderr", '  File "<cell of run 2026-a1>", line 3, in <module>')
    assert text([warned, raised]) == (
        "[0] Cell, line 19: UserWarning: slow\n      f(x)\n[1]   Cell, line 3, in <module>\n"
    )
    assert "2026-a1" not in html([warned, raised])


def test_pieces_come_once() -> None:
    lines = Lines()
    pieces = [out(1, 0, "a\n"), out(2, 0, "b\n")]
    assert text(lines.take(pieces[:1])) == "[0] a\n"
    assert text(lines.take(pieces)) == "[0] b\n"
    assert lines.take(pieces) == []


def test_an_unfinished_line_is_shown_as_it_grows_and_once_when_it_is_complete() -> None:
    lines = Lines()
    assert lines.take([out(1, 0, "load")]) == []
    assert text(lines.unfinished()) == "[0] load\n"
    assert lines.take([]) == []
    assert lines.take([out(2, 0, "ing"), out(3, 1, "loading")]) == []
    assert text(lines.unfinished()) == "[0-1] loading\n"
    assert text(lines.take([out(4, 0, " done\n")])) == "[0] loading done\n"
    assert text(lines.unfinished()) == "[1] loading\n"


def test_nested_progress_bars_leave_a_row_each() -> None:
    """As tqdm draws them: the inner bar is a row below, from which the cursor goes up again."""
    lines, number = Lines(), 0
    for outer in range(3):
        for inner in range(3):
            number += 1
            said = f"\repoch {outer}/2\n\rbatch {inner}/2\x1b[A"
            assert lines.take([out(number, 0, said, "stderr")]) == []
            assert text(lines.unfinished()) == f"[0] epoch {outer}/2\n[0] batch {inner}/2\n"
    assert text(lines.take([out(number + 1, 0, "\n\n", "stderr")], last=True)) == "[0] epoch 2/2\n[0] batch 2/2\n"


def test_a_progress_bar_leaves_its_last_state() -> None:
    said = "\r 10%\r 50%\r\x1b[32m100%\x1b[0m\n"
    assert Lines().take([out(1, 0, said, "stderr")]) == [Line((0,), "stderr", "100%")]


def test_html_shows_what_was_printed_and_runs_none_of_it() -> None:
    page = html(Lines().take([out(1, 0, "<script>x</script>\n")]))
    assert "&lt;script&gt;x&lt;/script&gt;" in page
    assert "<script>" not in page


def test_a_very_long_line_is_cut_on_a_page() -> None:
    page = html([Line((0,), "stdout", "z" * (LONGEST + 12))])
    assert page.endswith("z … 12 more characters</div>")
    assert page.count("z") == LONGEST


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
        ("bar\n\rinner\r     \r\x1b[A\rdone\n", ["done"]),  # tqdm(leave=False) writes spaces over its row
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
