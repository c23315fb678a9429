"""The rows that a stream of text leaves on a terminal: what progress bars overwrite is gone, as it is there."""

from __future__ import annotations

import re

__all__ = ["TerminalRows"]

# A control sequence (its parameter and letter), a character that moves the cursor, or the beginning of a sequence.
_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\n\r\x08])|(\x1b(?:\[[0-9;?]*)?$)")

# What one sequence may ask for: a page has no use for more, and a hostile one would fill the memory.
_MOST_DOWN = 100
_MOST_RIGHT = 1000


class TerminalRows:
    """The rows of one stream that may still change: the row of the cursor and those below it.

    Colors are dropped. Of the rest, what tqdm and rich use: the cursor up, down, right and to a column, erasing a row
    or its end, backspace.
    """

    def __init__(self) -> None:
        self._rows = [""]
        self._row = self._column = 0
        self._cut = ""  # the beginning of a control sequence whose end is in the next piece
        self.goes_up = False
        """Whether the stream has moved the cursor up before, so that it may again."""
        self._left = 0  # rows that the cursor has been below since the last `settle`

    @property
    def open(self) -> list[str]:
        """The rows that may still change, without empty ones at the end."""
        rows = list(self._rows)
        while rows and not rows[-1]:
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
        """Take the rows above the cursor, which are complete; with ``last`` all.

        Those of a stream that moves the cursor up are taken when the cursor has been below them for two calls.
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

    def _control(self, parameter: str, letter: str) -> None:
        count = int(parameter) if parameter.isdecimal() else 1
        if letter == "A":
            self.goes_up = True
            self._go_to(max(0, self._row - count))
        elif letter == "B":
            self._go_to(self._row + min(count, _MOST_DOWN))
        elif letter == "C":
            self._column += min(count, _MOST_RIGHT)
        elif letter == "G":
            self._column = min(max(0, count - 1), _MOST_RIGHT)
        elif letter == "K":
            kept = "" if parameter == "2" else self._rows[self._row][: self._column]
            self._rows[self._row] = kept

    def _go_to(self, row: int) -> None:
        self._row = row
        self._left = min(self._left, row)
        self._rows += [""] * (row + 1 - len(self._rows))
