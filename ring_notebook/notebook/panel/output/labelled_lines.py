"""Output of the ranks as lines labelled with their ranks; equal lines of several ranks become one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from ring_notebook.notebook.panel.output.terminal_rows import TerminalRows
from ring_notebook.notebook.record.run_view import Printed
from ring_notebook.notebook.style import GREY, rank_color, rank_list

__all__ = ["Line", "Lines", "html", "text"]


class Line(NamedTuple):
    """A line that ``ranks`` printed to ``stream``."""

    ranks: tuple[int, ...]
    stream: str
    text: str


class Lines:
    """Splits pieces of output into lines. A row that may still change, as a progress bar does, is in `unfinished`."""

    def __init__(self) -> None:
        self._seen = 0
        self._rows: dict[tuple[int, str], TerminalRows] = {}

    def take(self, pieces: Iterable[Printed], last: bool = False) -> list[Line]:
        """The lines that these pieces complete, with ``last`` unfinished ones too; pieces seen before are skipped."""
        lines: list[tuple[int, str, str]] = []

        def settle(key: tuple[int, str], last: bool = False) -> None:
            lines.extend((*key, line) for line in self._rows[key].settle(last))

        for piece in pieces:
            if piece.number <= self._seen:
                continue
            self._seen = piece.number
            key = piece.rank, piece.stream
            rows = self._rows.setdefault(key, TerminalRows())
            rows.write(piece.text)
            if not rows.goes_up:  # at once, so that lines stay in the order in which they came
                settle(key)
        for key, rows in self._rows.items():
            if last or rows.goes_up:
                settle(key, last)
        return _joined(lines)

    def unfinished(self) -> list[Line]:
        """The rows that may still change, as they are now."""
        return _joined([(*key, line) for key, rows in self._rows.items() for line in rows.open])


def _joined(lines: list[tuple[int, str, str]]) -> list[Line]:
    # The n-th equal line of one rank joins the n-th of another, so that repeated lines stay repeated.
    said: Counter[tuple[int, str, str]] = Counter()
    joined: dict[tuple[str, str, int], list[int]] = {}
    for line in lines:
        rank, stream, content = line
        said[line] += 1
        joined.setdefault((stream, content, said[line]), []).append(rank)
    return [Line(tuple(ranks), stream, content) for (stream, content, _), ranks in joined.items()]


def html(lines: Iterable[Line]) -> str:
    """The lines for a page, each after its ranks."""
    parts = []
    for line in lines:
        color = rank_color(line.ranks[0]) if len(line.ranks) == 1 else GREY
        label = f"<span style='color:{color};user-select:none'>[{rank_list(line.ranks)}]</span>"
        parts.append(f"<div>{label} {escape(line.text)}</div>")
    return "".join(parts)


def text(lines: Iterable[Line]) -> str:
    """The lines for a terminal."""
    return "".join(f"[{rank_list(line.ranks)}] {line.text}\n" for line in lines)
