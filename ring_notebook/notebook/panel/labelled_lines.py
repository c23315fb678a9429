"""Output of the ranks as lines labelled with their ranks; equal lines of several ranks become one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import chain, zip_longest
from typing import NamedTuple

from ring_notebook.notebook.colors import GREY, rank_color
from ring_notebook.notebook.record.run_view import Printed
from ring_notebook.text.error_text import name_cells
from ring_notebook.text.words import rank_list

_RankLine = tuple[int, str, str]  # rank, stream and line
_BLOCK = "display:inline-block;vertical-align:top;max-width:calc(100% - 6ch);white-space:pre-wrap;word-break:break-all"
LONGEST = 2000  # characters of a line in a page
_MOST_OF_A_ROUND = 3  # pieces of a rank; a message with blocks has several


class Line(NamedTuple):
    """A line that ``ranks`` printed to ``stream``, or the lines of one print."""

    ranks: tuple[int, ...]
    stream: str
    text: str


class Lines:
    """Splits pieces of output into lines. Rows that may still change, such as progress bars, are in `unfinished`."""

    def __init__(self) -> None:
        self._seen = 0
        self._rows: dict[tuple[int, str], TerminalRows] = {}

    def take(self, pieces: Iterable[Printed], last: bool = False) -> list[Line]:
        """The lines that new pieces complete; with ``last`` also unfinished ones. Pieces seen before are skipped."""
        new = [piece for piece in pieces if piece.number > self._seen]
        self._seen = new[-1].number if new else self._seen
        lines: list[_RankLine] = []
        for arrived in _rounds(new):  # the first line of every rank, the second of every rank, and so on
            lines += filter(None, chain(*zip_longest(*map(self._split, arrived))))
        for (rank, stream), rows in self._rows.items():
            if last or rows.goes_up:
                lines.extend((rank, stream, line) for line in rows.settle(last))
        return _joined(lines)

    def _split(self, pieces: Iterable[Printed]) -> list[_RankLine]:
        """The lines that the pieces of a rank complete; a block counts as one line."""
        lines: list[_RankLine] = []
        for piece in pieces:
            rows = self._rows.setdefault((piece.rank, piece.stream), TerminalRows())
            rows.write(piece.text)
            if not rows.goes_up:  # else rows are complete when the cursor has been below them for a while
                settled = rows.settle()
                settled = ["\n".join(settled)] if piece.block else settled
                lines += [(piece.rank, piece.stream, line) for line in settled]
        return lines

    def unfinished(self) -> list[Line]:
        """The rows that may still change, as they are now."""
        return _joined([(*key, line) for key, rows in self._rows.items() for line in rows.open])


def _rounds(pieces: Iterable[Printed]) -> Iterator[list[list[Printed]]]:
    """The pieces that ranks sent at about the same time, a list per rank, in the order of the ranks."""
    arrived: dict[int, list[Printed]] = {}
    last = -1
    for piece in pieces:
        own = arrived.get(piece.rank, [])
        if own and (piece.rank != last or len(own) == _MOST_OF_A_ROUND):
            yield [arrived[rank] for rank in sorted(arrived)]
            arrived = {}
        arrived.setdefault(piece.rank, []).append(piece)
        last = piece.rank
    yield [arrived[rank] for rank in sorted(arrived)]


def _joined(lines: list[_RankLine]) -> list[Line]:
    # The n-th equal line of one rank joins the n-th of another, so that repeated lines stay repeated.
    times: Counter[_RankLine] = Counter()
    joined: dict[tuple[str, str, int], list[int]] = {}
    for line in lines:
        rank, stream, content = line
        times[line] += 1
        joined.setdefault((stream, content, times[line]), []).append(rank)
    return [Line(tuple(ranks), stream, content) for (stream, content, _), ranks in joined.items()]


def count(lines: Iterable[Line]) -> int:
    """The number of lines, including those within one print."""
    return sum(line.text.count("\n") + 1 for line in lines)


def split_last(lines: Sequence[Line], wanted: int) -> tuple[Sequence[Line], Sequence[Line]]:
    """Divide the lines before the last ``wanted``; the lines of the very last print stay together."""
    start = len(lines)
    while start > 0 and (start == len(lines) or count(lines[start - 1 :]) <= wanted):
        start -= 1
    return lines[:start], lines[start:]


def html(lines: Iterable[Line]) -> str:
    """The lines for a page, each after the numbers of its ranks."""
    parts = []
    for line in lines:
        color = rank_color(line.ranks[0]) if len(line.ranks) == 1 else GREY
        label = f"<span style='color:{color};user-select:none'>[{rank_list(line.ranks)}]</span>"
        shown = name_cells(line.text)
        more = len(shown) - LONGEST if "\n" not in shown else 0
        body = f"{escape(shown[:LONGEST])} … {more:,} more characters" if more > 0 else escape(shown)
        if "\n" in line.text:
            body = f"<span style='{_BLOCK}'>{body}</span>"
        parts.append(f"<div>{label} {body}</div>")
    return "".join(parts)


def text(lines: Iterable[Line]) -> str:
    shown = []
    for line in lines:
        label = f"[{rank_list(line.ranks)}] "
        below = "\n" + " " * len(label)
        text = name_cells(line.text)
        shown.append(f"{label}{text.replace(chr(10), below)}\n")
    return "".join(shown)


# A control sequence (its parameter and letter), a character that moves the cursor, or the beginning of a sequence.
_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\n\r\x08])|(\x1b(?:\[[0-9;?]*)?$)")

# Limits of one sequence: a page needs no more, and a hostile sequence would fill the memory.
_MOST_DOWN = 100
_MOST_RIGHT = 1000


class TerminalRows:
    """The rows that one stream of text leaves on a terminal, as far as they may still change.

    These are the row of the cursor and the rows below it. Overwritten text is gone, as on a terminal.

    Colors are dropped. The control sequences of tqdm and rich work: cursor up, down, right and to a column; erase a
    row or its end; backspace.
    """

    def __init__(self) -> None:
        self._rows = [""]
        self._row = self._column = 0
        self._cut = ""  # the beginning of a control sequence whose end is in the next piece
        self.goes_up = False
        """Whether the stream has moved the cursor up before: it may do so again."""
        self._left = 0  # rows that the cursor has stayed below since the last `settle`

    @property
    def open(self) -> list[str]:
        """The rows that may still change, without empty ones at the end."""
        rows = list(self._rows)
        while rows and not rows[-1].strip():  # progress bars erase a row with spaces
            rows.pop()
        return rows

    def write(self, text: str) -> None:
        """Take in the next piece of the stream."""
        text, self._cut = self._cut + text, ""
        end = 0
        for match in _CONTROL.finditer(text):
            self._put(text[end : match.start()])
            end = match.end()
            if match[4]:
                self._cut = match[4]
            elif match[3]:
                self._move(match[3])
            else:
                self._control(match[1], match[2])
        self._put(text[end:])

    def settle(self, last: bool = False) -> list[str]:
        """Take the rows above the cursor, which are complete; with ``last`` all rows.

        If the stream moves the cursor up, a row is complete when the cursor has stayed below it for two calls.
        """
        if last:
            rows, self._rows, self._row = self.open, [""], 0
            return rows
        count = min(self._row, self._left) if self.goes_up else self._row
        self._left = self._row - count
        rows, self._rows, self._row = self._rows[:count], self._rows[count:], self._row - count
        return rows

    def _put(self, text: str) -> None:
        if text:
            row = self._rows[self._row].ljust(self._column)
            self._rows[self._row] = row[: self._column] + text + row[self._column + len(text) :]
            self._column += len(text)

    def _move(self, character: str) -> None:
        if character == "\n":
            self._go_to(self._row + 1)
        self._column = max(0, self._column - 1) if character == "\x08" else 0

    def _control(self, parameter: str, command: str) -> None:
        count = int(parameter) if parameter.isdecimal() else 1
        if command == "A":
            self.goes_up = True
            self._go_to(max(0, self._row - count))
        elif command == "B":
            self._go_to(self._row + min(count, _MOST_DOWN))
        elif command == "C":
            self._column += min(count, _MOST_RIGHT)
        elif command == "G":
            self._column = min(max(0, count - 1), _MOST_RIGHT)
        elif command == "K":
            kept = "" if parameter == "2" else self._rows[self._row][: self._column]
            self._rows[self._row] = kept

    def _go_to(self, row: int) -> None:
        self._row = row
        self._left = min(self._left, row)
        self._rows += [""] * (row + 1 - len(self._rows))
