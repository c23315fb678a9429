"""A small table that notebooks show as HTML and terminals as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Listing"]


@dataclass
class Listing:
    """Rows of text under ``columns``, all of the same length, and lines of text below."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __repr__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        text = [
            "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([*text, *filter(None, [self.note])])

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:left'>{escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        note = "".join(f"<p>{escape(line)}</p>" for line in self.note.splitlines())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"
