"""Output of the ranks as lines labelled with their ranks; equal lines of several ranks become one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from ring_notebook.notebook.record.run_view import Printed
from ring_notebook.notebook.style import GREY, rank_color, rank_list

__all__ = ["Line", "Lines", "html", "text"]

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Line(NamedTuple):
    """A line that ``ranks`` printed to ``stream``."""

    ranks: tuple[int, ...]
    stream: str
    text: str


class Lines:
    """Splits pieces of output into lines. An unfinished line is kept back while it grows, like a progress bar."""

    def __init__(self) -> None:
        self._seen = 0
        self._open: dict[tuple[int, str], str] = {}

    def take(self, pieces: Iterable[Printed], last: bool = False) -> list[Line]:
        """The lines that these pieces complete; pieces of earlier calls are skipped.

        An unfinished line is returned when it has not grown since the last call, or with ``last``.
        """
        open_before = dict(self._open)
        lines: list[tuple[int, str, str]] = []
        for piece in pieces:
            if piece.number <= self._seen:
                continue
            self._seen = piece.number
            key = piece.rank, piece.stream
            *complete, rest = (self._open.get(key, "") + piece.text).split("\n")
            lines += [(*key, line) for line in complete]
            self._open[key] = rest
        for key, rest in list(self._open.items()):
            if not rest or last or open_before.get(key) == rest:
                del self._open[key]
                lines += [(*key, rest)] * bool(rest)
        return _joined(lines)


def _joined(lines: list[tuple[int, str, str]]) -> list[Line]:
    # The n-th equal line of one rank joins the n-th of another, so that repeated lines stay repeated.
    said: Counter[tuple[int, str, str]] = Counter()
    joined: dict[tuple[str, str, int], list[int]] = {}
    for line in lines:
        rank, stream, content = line
        said[line] += 1
        joined.setdefault((stream, content, said[line]), []).append(rank)
    return [Line(tuple(ranks), stream, _plain(content)) for (stream, content, _), ranks in joined.items()]


def _plain(line: str) -> str:
    """The line as a terminal shows it: what a carriage return overwrites and colors are removed."""
    return _ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2])


def html(lines: Iterable[Line]) -> str:
    """The lines for a page, each after its ranks."""
    parts = []
    for line in lines:
        color = rank_color(line.ranks[0]) if len(line.ranks) == 1 else GREY
        style = " style='color:#ef4444'" if line.stream == "stderr" else ""
        label = f"<span style='color:{color};user-select:none'>[{rank_list(line.ranks)}]</span>"
        parts.append(f"<div>{label} <span{style}>{escape(line.text)}</span></div>")
    return "".join(parts)


def text(lines: Iterable[Line]) -> str:
    """The lines for a terminal."""
    return "".join(f"[{rank_list(line.ranks)}] {line.text}\n" for line in lines)
