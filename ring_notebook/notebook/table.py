"""A table for notebooks (HTML) and terminals. A page can sort it and show more columns without a script."""

from __future__ import annotations

import math
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from ring_notebook.text.words import aligned, shortened

_CHARACTER, _BESIDE, _ARROWS = 6.8, 13, 26  # pixels: of a character, between columns, of the arrows of a title
_MOST = 24  # characters of a cell
_HIDDEN = "position:absolute;opacity:0;width:0"
# CSS can order items of a grid, but not rows of a table. Without this sheet there are no arrows.
# GROUP is the class of one table, so that two tables in a notebook do not share their columns.
_CSS = """<style>
.GROUP { overflow-x: auto; container-type: inline-size; }
.GROUP .c0 { position: sticky; left: 0; background: var(--jp-layout-color0, Canvas); }
.GROUP table { font-size: 12px; display: grid; width: max-content; grid-template-columns: repeat(COLUMNS, auto); }
.GROUP thead, .GROUP tbody { display: contents; }
.GROUP tr { display: grid; grid-template-columns: subgrid; grid-column: 1 / -1; background: none !important; }
.GROUP thead tr { order: -1; }
.GROUP th, .GROUP td { text-align: left !important; padding: 2px 6px !important; white-space: nowrap; max-width: MOSTch;
  overflow: hidden; text-overflow: ellipsis; }
.GROUP label { cursor: pointer; margin-left: 2px; font-weight: 600; }
.GROUP th label::after { content: "\\25BE"; opacity: .35; }
.GROUP th label + label { margin-left: 0; }
.GROUP th label + label::after { content: "\\25B4"; }
.GROUP label:hover::after, .GROUP label:focus-within::after { opacity: 1; }
.GROUP label:has(:checked)::after { opacity: 1; color: #3b82f6; }
.GROUP details label { margin-right: 8px; font-weight: 400; white-space: nowrap; display: none; }
RULES
</style>"""


@dataclass
class Listing:
    """Rows of text under ``columns``, all of the same length, and lines of text below.

    ``keys`` are what a page can sort by: a value for each row by column, None if there is none. ``pictures`` are
    HTML in place of a column's texts. Columns of ``folded`` are hidden until a reader chooses them, as are the last
    ones on a page that is too narrow for them; a terminal leaves ``folded`` out.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    keys: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    pictures: Mapping[str, Sequence[str]] = field(default_factory=dict)
    folded: Collection[str] = ()

    def __repr__(self) -> str:
        shown = [index for index, name in enumerate(self.columns) if name not in self.folded]
        text = aligned([[line[index] for index in shown] for line in (self.columns, *self.rows)])
        return "\n".join(filter(None, [text, self.note]))

    def _repr_html_(self) -> str:
        note = "".join(f"<p>{escape(line)}</p>" for line in self.note.splitlines())
        if not self.rows and note:
            return note
        if not self.keys and not self.folded:
            head = "".join(f"<th style='text-align:left'>{escape(name)}</th>" for name in self.columns)
            body = "".join(
                "<tr>" + "".join(f"<td style='text-align:left'>{escape(cell)}</td>" for cell in row) + "</tr>"
                for row in self.rows
            )
            return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"
        group = f"ring-{uuid.uuid4().hex[:8]}"
        head = "".join(
            f"<th class='c{index}'>{self._title(name, group)}</th>" for index, name in enumerate(self.columns)
        )
        orders = self._orders()
        body = "".join(
            f"<tr{orders[row]}>"
            + "".join(f"<td class='c{index}'>{self._cell(row, index)}</td>" for index in range(len(self.columns)))
            + "</tr>"
            for row in range(len(self.rows))
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"{self._sheet(group)}<div class='ring-table {group}'>{table}{self._picker()}</div>{note}"

    def _cell(self, row: int, index: int) -> str:
        pictures = self.pictures.get(self.columns[index])
        text = escape(self.rows[row][index])
        # The title shows the whole text of a cell that is cut.
        return pictures[row] if pictures else f"<span title='{escape(text, quote=True)}'>{text}</span>"

    def _title(self, column: str, group: str) -> str:
        """The title of a column, with an arrow for each order: largest first, and smallest first."""
        title = f"<span title='{escape(column, quote=True)}'>{escape(shortened(self.columns)[column])}</span>"
        if column not in self.keys:
            return title
        number = list(self.keys).index(column)
        for way, word in (("d", "largest"), ("a", "smallest")):
            choice = f"<input type='radio' name='{group}' value='{way}{number}' style='{_HIDDEN}'>"
            title += f"<label title='{escape(f'{column}: {word} first', quote=True)}'>{choice}</label>"
        return title

    def _picker(self) -> str:
        """Boxes with which a reader shows the columns that are hidden at this width."""
        boxes = "".join(
            f"<label class='p{index}'><input type='checkbox' value='c{index}'> {escape(name)}</label>"
            for index, name in enumerate(self.columns)
            if index
        )
        return f"<details><summary>more columns</summary>{boxes}</details>"

    def _widths(self) -> list[float]:
        """For each column, the pixels of a page that shows it and those before it; folded columns need none."""
        texts, widths = shortened(self.columns), [0.0]
        for index, name in enumerate(self.columns):
            longest = max([len(texts[name]), *(min(len(row[index]), _MOST) for row in self.rows)])
            title = len(texts[name]) * _CHARACTER + _ARROWS * (name in self.keys)
            widths.append(widths[-1] + (name not in self.folded) * (max(longest * _CHARACTER, title) + _BESIDE))
        return widths[1:]

    def _orders(self) -> list[str]:
        """The place of each row in every order, as variables of CSS; rows without a number are always last."""
        places: list[list[str]] = [[] for _ in self.rows]
        for number, values in enumerate(self.keys.values()):
            for way in "ad":
                order = sorted(range(len(values)), key=lambda row: sort_key(values[row], largest_first=way == "d"))
                for place, row in enumerate(order):
                    places[row].append(f"--{way}{number}:{place}")
        return [f" style='{';'.join(one)}'" if one else "" for one in places]

    def _sheet(self, group: str) -> str:
        rules = [
            f".{group}:has([value={way}{number}]:checked) tbody tr {{ order: var(--{way}{number}); }}"
            for number in range(len(self.keys))
            for way in "da"
        ]
        widths = self._widths()
        for index, name in enumerate(self.columns[1:], start=1):
            hidden = f".{group}:not(:has([value=c{index}]:checked)) .c{index} {{ display: none; }}"
            hidden += f" .{group} details .p{index} {{ display: inline; }}"
            narrow = f"@container (width < {widths[index]:.0f}px)"
            rules.append(hidden if name in self.folded else f"{narrow} {{ {hidden} }}")
        if not self.folded:
            rules.append(f"@container (width >= {widths[-1]:.0f}px) {{ .{group} details {{ display: none; }} }}")
        sheet = _CSS.replace("GROUP", group).replace("COLUMNS", str(len(self.columns))).replace("MOST", str(_MOST))
        return sheet.replace("RULES", "\n".join(rules))


class _Reversed:
    """A value that sorts before smaller ones."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __lt__(self, other: _Reversed) -> bool:
        return bool(other._value < self._value)


def sort_key(value: Any, largest_first: bool = False) -> tuple[int, Any]:
    """A key that sorts numbers first, then texts; missing values and NaN are last in both directions."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return 2, 0
    number = isinstance(value, int | float)
    key = value if number else str(value)
    return int(not number), _Reversed(key) if largest_first else key
