"""What the ranks are doing before the first step: shown in the place of charts, so that no box is empty."""

from __future__ import annotations

from html import escape

from ring_notebook.notebook.record.run_view import RunView
from ring_notebook.notebook.style import duration, ranks

__all__ = ["html", "lines", "source_line"]

_MOST = 4  # places at which ranks are
_MOST_CHARACTERS = 100


def source_line(source: str, first_line: int, line: int) -> str:
    """The text of a line of the cell, by the number that the notebook shows; empty when there is none."""
    listed = source.splitlines()
    index = line - first_line
    text = listed[index].strip() if 0 <= index < len(listed) else ""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


def lines(view: RunView, source: str, first_line: int) -> list[str]:
    """A line for each place of the cell at which ranks are, and since when."""
    places: dict[int, list[int]] = {}
    since: dict[int, float] = {}
    for rank in view.ranks:
        if rank.ended is None:
            line = rank.status.line if rank.status else -1
            places.setdefault(line, []).append(rank.rank)
            since[line] = max(since.get(line, 0.0), rank.idle)
    return [_at(line, places[line], since[line], source, first_line) for line in sorted(places)[:_MOST]]


def _at(line: int, who: list[int], seconds: float, source: str, first_line: int) -> str:
    if line < 0:
        return f"{ranks(who)}: the cell is on its way ({duration(seconds)})"
    if line == 0:
        return f"{ranks(who)}: opening the run ({duration(seconds)})"
    return f"{ranks(who)} at line {line}: {source_line(source, first_line, line)} ({duration(seconds)})"


def html(view: RunView, source: str, first_line: int) -> str:
    """The lines for a page; empty when all ranks have ended."""
    listed = lines(view, source, first_line)
    if not listed:
        return ""
    return f"<div class='ring-begin'>{''.join(f'<div>{escape(one)}</div>' for one in listed)}</div>"
