"""A small table that notebooks show as HTML and terminals as text; a page can sort it without a script or a kernel."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

__all__ = ["Listing"]

_HIDDEN = "position:absolute;opacity:0;width:0"
# Rows of a table have no order of their own in CSS, and items of a grid do. Without this sheet there are no arrows.
_CSS = """<style>
.ring-sorted { overflow-x: auto; }
.ring-sorted table { display: grid; width: max-content; }
.ring-sorted thead, .ring-sorted tbody { display: contents; }
.ring-sorted tr { display: grid; grid-template-columns: subgrid; grid-column: 1 / -1; background: none !important; }
.ring-sorted thead tr { order: -1; }
.ring-sorted label { cursor: pointer; margin-left: 6px; font-weight: 600; }
.ring-sorted label::after { content: "\\25BE"; opacity: .35; margin-left: 2px; }
.ring-sorted label + label { margin-left: 0; }
.ring-sorted label + label::after { content: "\\25B4"; }
.ring-sorted label:hover::after, .ring-sorted label:focus-within::after { opacity: 1; }
.ring-sorted label:has(:checked)::after { opacity: 1; color: #3b82f6; }
%s
</style>"""


@dataclass
class Listing:
    """Rows of text under ``columns``, all of the same length, and lines of text below.

    ``keys`` are what a page can sort by: a value for each row by name, None where there is none. A name that is not a
    column stands under the one that ``under`` gives.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    keys: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    under: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        text = [
            "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([*text, *filter(None, [self.note])])

    def _repr_html_(self) -> str:
        group = f"ring-{uuid.uuid4().hex[:8]}"  # the arrows of one table are a choice, and no other's
        head = "".join(f"<th style='text-align:left'>{self._title(name, group)}</th>" for name in self.columns)
        orders = self._orders()
        body = "".join(
            f"<tr{orders[index]}>"
            + "".join(f"<td style='text-align:left'>{escape(cell)}</td>" for cell in row)
            + "</tr>"
            for index, row in enumerate(self.rows)
        )
        note = "".join(f"<p>{escape(line)}</p>" for line in self.note.splitlines())
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"{self._sheet()}<div class='ring-sorted'>{table}</div>{note}" if self.keys else f"{table}{note}"

    def _title(self, column: str, group: str) -> str:
        """A column's title, with arrows for what it sorts by: largest first, and smallest first."""
        parts = [escape(column)]
        for index, name in enumerate(self.keys):
            if self.under.get(name, name) == column:
                choices = [
                    f"<input type='radio' name='{group}' value='{way}{index}' style='{_HIDDEN}'>" for way in "da"
                ]
                word = "" if name == column else escape(name)
                tips = [escape(f"{name}: {way} first", quote=True) for way in ("largest", "smallest")]
                parts.append(f"<label title='{tips[0]}'>{word}{choices[0]}</label>")
                parts.append(f"<label title='{tips[1]}'>{choices[1]}</label>")
        return "".join(parts)

    def _orders(self) -> list[str]:
        """For each row its place in every order, as variables of CSS; rows without a value are the last in all."""
        places: list[list[str]] = [[] for _ in self.rows]
        for index, values in enumerate(self.keys.values()):
            known = sorted(
                (row for row, value in enumerate(values) if value is not None), key=lambda row: _key(values[row])
            )
            rest = [row for row, value in enumerate(values) if value is None]
            for way, order in (("a", known), ("d", known[::-1])):
                for place, row in enumerate([*order, *rest]):
                    places[row].append(f"--{way}{index}:{place}")
        return [f" style='{';'.join(one)}'" if one else "" for one in places]

    def _sheet(self) -> str:
        columns = f".ring-sorted table {{ grid-template-columns: repeat({len(self.columns)}, auto); }}"
        ways = [f"{way}{index}" for index in range(len(self.keys)) for way in "da"]
        rules = [f".ring-sorted:has([value={way}]:checked) tbody tr {{ order: var(--{way}); }}" for way in ways]
        return _CSS % "\n".join([columns, *rules])


def _key(value: Any) -> tuple[bool, Any]:
    """What sorts numbers among themselves, and texts before them."""
    number = isinstance(value, int | float)
    return number, value if number else str(value)
