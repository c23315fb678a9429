"""Still charts for saved notebooks without live widgets: SVG that fills any width, with text of constant size.

Only the curves are stretched, in an inner picture with lines of constant width. Everything else is placed in percent of
the width. To zoom is to make the picture wider, which then shows more ticks. The labels of the y axis are a picture of
their own, which stays in place.

On a page the pictures are in frames that scroll, with values to hover over. If the page keeps our style sheet, a click
zooms (a ``details`` element). A page that does not trust the notebook removes the sheet but keeps the styles of
elements; there a reader drags the corner of a chart. Neither needs a script or a kernel.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from html import escape

import numpy as np

from ring_notebook.notebook.colors import CHANGED, GREY, RED
from ring_notebook.notebook.panel.charts.axes import Scale, margin
from ring_notebook.notebook.panel.charts.chart import Chart, columns
from ring_notebook.notebook.panel.charts.curves import BAND, Curves
from ring_notebook.notebook.record.series import Floats
from ring_notebook.notebook.style import number

HEIGHT = 250  # pixels
TOP, BOTTOM = 48, 32  # margins
SIDE = 2  # percent, so that a mark at the beginning or the end of a narrow chart is not cut
_BEGIN, _END = 0.02, 0.97  # of the x axis; a label outside begins or ends with the axis
NEAR = 0.08  # of the width of a narrow chart: half of "epoch 1"
RAW = 0.3  # the opacity of the values behind a smooth line
TIPS = 60  # places of a chart with values to hover over
MOST_LABELS = 24  # in the legend
_LEGEND = 400  # its width; a narrow page cuts it
_UNIT = 1000  # the curves' own coordinates,
_ACROSS = 4000  # and those along the x axis, which may be drawn several times as wide
_WIDE = 1400  # pixels; a wider picture shows more ticks, and repeats the text of its beginning
_AGAIN = range(20, 100, 20)  # percent of the width where it repeats it, for a page that has scrolled there
_FONT = "font-family='system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif'"


def svg(chart: Chart) -> str:
    """The chart as one SVG without a width of its own. Its colors suit light and dark pages."""
    x, y = chart.scales
    legend, more = _legend(chart.curves)
    top = TOP + more
    height = HEIGHT - top - BOTTOM
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='100%' height='{HEIGHT}' {_FONT} font-size='11' fill='{GREY}'>"
        f"<style>@media(max-width:{_WIDE}px){{.w{{display:none}}}}</style>",
        _title(chart),
        *(f"<text class='w' x='{at}%' y='15' font-weight='600'>{escape(chart.heading)}</text>" for at in _AGAIN),
        *legend,
        f"<svg x='{SIDE}%' y='{top}' width='{100 - 2 * SIDE}%' height='{height}' overflow='visible'>",
    ]
    for tick in y.ticks:
        at = f"{100 - 100 * y.place(tick):.2f}%"
        parts.append(f"<line x1='0' x2='100%' y1='{at}' y2='{at}' stroke='{GREY}' stroke-opacity='.22'/>")
    ticks = [*((tick, "") for tick in x.ticks), *((tick, " class='w'") for tick in x.finer_ticks)]
    for tick, kind in ticks if chart.curves.lines else ():  # an empty chart has no values yet
        at = f"{100 * x.place(tick):.2f}%"
        anchor = _anchor(x.place(tick), _BEGIN, _END)
        parts.append(f"<text{kind} x='{at}' y='{height + 17}' text-anchor='{anchor}'>{x.label(tick)}</text>")
    parts += _epochs(chart, x)
    inner = f"width='100%' height='100%' viewBox='0 0 {_ACROSS} {_UNIT}' preserveAspectRatio='none'"
    parts.append(f"<svg {inner} overflow='visible'>")
    parts += [*_lines(chart.curves, x, y), "</svg>", *_points(chart, x, y), "</svg></svg>"]
    return "".join(parts)


def _title(chart: Chart) -> str:
    """The title and the note beside it; a part of the note without room is left out, not cut."""
    texts, narrow, width = [], "", round(7.8 * len(chart.heading)) + 9
    for index, part in enumerate(chart.note.split(" · ")):
        text = f" · {part}" if index else part
        width += round(5.9 * len(text))
        narrow += f"@media(max-width:{width}px){{.n{index}{{display:none}}}}" if index else ""
        texts.append(f"<tspan class='n{index}' dx='{0 if index else 8}'>{escape(text)}</tspan>")
    title = f"<tspan font-size='13' font-weight='600'>{escape(chart.heading)}</tspan>"
    return f"<style>{narrow}</style><text x='1' y='15' xml:space='preserve'>{title}{''.join(texts)}</text>"


def labels(chart: Chart) -> tuple[str, int]:
    """The labels of the y axis, its unit and the name of the x axis as one SVG, and its width in pixels."""
    _, y = chart.scales
    top, width = TOP + _legend(chart.curves)[1], margin(y, chart.values, chart.unit)
    height = HEIGHT - top - BOTTOM
    ticks = y.ticks if chart.curves.lines else ()
    labels = [(top + height * (1 - y.place(tick)) + 4, y.label(tick)) for tick in ticks]
    labels += [(top + height + 17, escape(chart.unit)), *[(top - 10, escape(chart.values))] * bool(chart.values)]
    texts = "".join(f"<text x='{width - 6}' y='{at:.1f}' text-anchor='end'>{text}</text>" for at, text in labels)
    size = f"width='{width}' height='{HEIGHT}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} {_FONT} font-size='11' fill='{GREY}'>{texts}</svg>", width


def _lines(curves: Curves, x: Scale, y: Scale) -> list[str]:
    parts = []
    if curves.band is not None and curves.drawn:
        there = np.isfinite(curves.band.low)
        around_x = np.concatenate([curves.band.x[there], curves.band.x[there][::-1]])
        around_y = np.concatenate([curves.band.low[there], curves.band.high[there][::-1]])
        color = curves.drawn[0].color
        parts.append(f"<path d='{_path(around_x, around_y, x, y)}Z' fill='{color}' fill-opacity='.18'/>")
    for line in curves.drawn:
        dashes = " stroke-dasharray='5 4'" if line.sparse else ""
        if line.raw is not None:
            parts.append(
                f"<path d='{_path(line.x, line.raw, x, y)}' fill='none' stroke='{line.color}' "
                f"stroke-opacity='{RAW}' vector-effect='non-scaling-stroke'/>"
            )
        parts.append(
            f"<path d='{_path(line.x, line.y, x, y)}' fill='none' stroke='{line.color}' stroke-width='1.8' "
            f"stroke-linejoin='round' vector-effect='non-scaling-stroke'{dashes}/>"
        )
    return parts


def _path(xs: Floats, ys: Floats, x: Scale, y: Scale) -> str:
    pieces, gap = [], True
    for one_x, one_y in zip(xs, ys, strict=True):
        if math.isfinite(one_y):
            pieces.append(f"{'M' if gap else 'L'}{_ACROSS * x.place(one_x):.0f} {_UNIT - _UNIT * y.place(one_y):.0f}")
        gap = not math.isfinite(one_y)
    return "".join(pieces)


def _points(chart: Chart, x: Scale, y: Scale) -> list[str]:
    parts = []
    for line in chart.curves.drawn:
        if line.marked:
            parts += [
                f"<circle cx='{100 * x.place(a):.2f}%' cy='{100 - 100 * y.place(b):.2f}%' r='3' fill='{line.color}'/>"
                for a, b in zip(line.x, line.y, strict=True)
                if math.isfinite(b)
            ]
    if chart.best is not None:
        cx, cy = f"{100 * x.place(chart.best[0]):.2f}%", f"{100 - 100 * y.place(chart.best[1]):.2f}%"
        parts.append(f"<circle cx='{cx}' cy='{cy}' r='4.5' fill='none' stroke='{GREY}' stroke-width='2'/>")
    for mark in chart.changes:
        at = f"{100 * x.place(mark.x):.2f}%"
        parts.append(f"<line x1='{at}' x2='{at}' y1='0' y2='100%' stroke='{CHANGED}' stroke-opacity='.8'/>")
        if mark.label:  # along the line, so that several do not lie over each other
            turned = f"<text transform='rotate(-90)' dy='-3' x='-2' text-anchor='end' fill='{CHANGED}' font-size='10'>"
            parts.append(f"<svg x='{at}' overflow='visible'>{turned}{escape(mark.label)}</text></svg>")
    for mark in chart.broken:
        at = f"{100 * x.place(mark.x):.2f}%"
        anchor = "end" if x.place(mark.x) > 0.6 else "start"
        offset = -5 if anchor == "end" else 5
        parts.append(
            f"<line x1='{at}' x2='{at}' y1='0' y2='100%' stroke='{RED}' stroke-width='1.5'/>"
            f"<text x='{at}' dx='{offset}' y='11' fill='{RED}' text-anchor='{anchor}'>{escape(mark.label)}</text>"
        )
    return parts


def _epochs(chart: Chart, x: Scale) -> list[str]:
    marks = chart.some_epochs
    parts = []
    for mark in marks:
        at = f"{100 * x.place(mark.x):.2f}%"
        parts.append(
            f"<line x1='{at}' x2='{at}' y1='0' y2='100%' stroke='{GREY}' stroke-opacity='.5' stroke-dasharray='2 3'/>"
        )
        if chart.broken:
            continue
        label = f"epoch {mark.label}" if mark is marks[0] else mark.label
        anchor = _anchor(x.place(mark.x), NEAR, 1 - NEAR) if mark is marks[0] else "middle"
        parts.append(f"<text x='{at}' y='-3' font-size='9' text-anchor='{anchor}'>{escape(label)}</text>")
    return parts


def _anchor(place: float, begin: float, end: float) -> str:
    """The text-anchor of a label at this share of the width, so that it is not cut."""
    return "start" if place < begin else "end" if place > end else "middle"


def _legend(curves: Curves) -> tuple[list[str], int]:
    """The labels of the drawn lines, in as many rows as needed, and the height of all rows but the first."""
    entries = [(line.label, line.color, line.sparse) for line in curves.drawn[:MOST_LABELS]]
    if len(entries) < 2 and curves.band is None and not curves.named:
        return [], 0
    parts: list[str] = []
    x, y = 1, 29
    narrow = ""  # a label without room is left out, not cut
    for label, color, sparse in [*entries, *([(BAND, entries[0][1], False)] if curves.band and entries else [])]:
        width = 26 + round(6.8 * len(label))
        if x > 1 and x + width > _LEGEND:
            x, y = 1, y + 14
        narrow += f"@media(max-width:{x + width - 10}px){{.l{len(parts)}{{display:none}}}}"
        parts.append(f"<g class='l{len(parts)}'>")
        if label == BAND:
            parts.append(f"<rect x='{x}' y='{y - 4}' width='12' height='8' fill='{color}' fill-opacity='.25'/>")
        else:
            dashes = " stroke-dasharray='4 3'" if sparse else ""
            parts.append(f"<path d='M{x} {y}h12' stroke='{color}' stroke-width='2.5'{dashes}/>")
        parts.append(f"<text x='{x + 16}' y='{y + 4}'>{escape(label)}</text></g>")
        x += width
    return [f"<style>{narrow}</style>", *parts], y - 29


def tips(chart: Chart) -> str:
    """Empty elements for places along the x axis; the style sheet shows the values in their attributes.

    A line that begins later or ends earlier has no value there.
    """
    x, _ = chart.scales
    drawn = [line for line in chart.curves.drawn if np.isfinite(line.y).any()]
    longest = max((len(line.x) for line in drawn), default=0)
    count = min(TIPS, longest)
    apart = (x.high - x.low) / max(count, 1)
    found = []
    for index in range(count):
        at = x.low + (index + 0.5) * apart
        rows = [f"{chart.xlabel} {at:,.{chart.digits}f}"]
        for line in drawn:
            known = np.flatnonzero(np.isfinite(line.y))
            if not line.x[known[0]] - apart / 2 <= at <= line.x[known[-1]] + apart / 2:
                continue
            nearest = known[np.abs(line.x[known] - at).argmin()]
            rows.append(f"{line.label}  {number(float(line.y[nearest]))} {chart.values}".rstrip())
        if chart.curves.band is not None:
            nearest = np.abs(chart.curves.band.x - at).argmin()
            low, high = chart.curves.band.low[nearest], chart.curves.band.high[nearest]
            rows.append(f"lowest {number(float(low))}, highest {number(float(high))}")
        found.append(f"<i data-tip='{'&#10;'.join(escape(row, quote=True) for row in rows)}'></i>")
    return "".join(found)


ZOOM = 500  # percent of the frame that a chart fills when it is zoomed
_ZOOM = (
    "<details class='ring-zoom'><summary>zoom</summary>"
    "<div>Drag the lower right corner of the chart, then scroll.</div></details>"
)

# A single chart fills the row, unless it is in one of several grids.
_COLUMNS = "\n".join(
    f".ring-columns-{name} {{ grid-template-columns: repeat({fit}, minmax(min(100%, max(260px, {least}%)), 1fr)); }}"
    for name, fit, least in (
        ("2", "auto-fit", 45),
        ("2-each", "auto-fill", 45),
        ("3", "auto-fit", 30),
        ("3-each", "auto-fill", 30),
    )
)
# The values are in attributes of empty elements, so that a page without styles does not show them.
CSS = f"""<style>
.ring-charts {{ display: grid; gap: 8px 24px; margin: 6px 0; }}
{_COLUMNS}
.ring-chart {{ position: relative; min-width: 0; }}
.ring-wide img {{ display: block; width: 100%; height: {HEIGHT}px; max-width: none; }}
.ring-zoom {{ position: absolute; right: 0; bottom: 0; z-index: 6; font-size: 11px; color: {GREY}; }}
.ring-chart .ring-zoom summary {{ list-style: none; margin: 0; padding: 0 2px; line-height: 11px; }}
.ring-zoom summary:hover {{ color: var(--jp-ui-font-color1, inherit); }}
.ring-zoom div {{ display: none; }}
.ring-zoom[open] {{ top: 0; bottom: auto; background: var(--jp-layout-color0, Canvas); }}
.ring-zoom[open] summary {{ font-size: 0; }}
.ring-zoom[open] summary::after {{ content: "show all"; font-size: 11px; }}
.ring-wide {{ resize: none !important; overflow: visible !important; }}
.ring-frame {{ overflow: visible !important; }}
.ring-zoom[open] ~ div .ring-frame {{ overflow: auto hidden !important; }}
.ring-zoom[open] ~ div .ring-wide {{ width: {ZOOM}% !important; }}
.ring-tips {{ position: absolute; left: {SIDE}%; right: {SIDE}%; top: {TOP}px; bottom: {BOTTOM}px; display: flex; }}
.ring-tips i {{ flex: 1; position: relative; font-style: normal; }}
.ring-tips i:hover::before {{ content: ""; position: absolute; left: 50%; top: 0; bottom: 0;
  border-left: 1px solid #8791a0; }}
.ring-tips i:hover::after {{ content: attr(data-tip); position: absolute; left: calc(50% + 8px); top: 6px; z-index: 5;
  white-space: pre; font: 11px/1.5 system-ui, sans-serif; padding: 4px 8px; border-radius: 4px; pointer-events: none;
  color: var(--jp-ui-font-color1, #222); background: var(--jp-layout-color1, #fff);
  box-shadow: 0 1px 6px #0005; font-variant-numeric: tabular-nums; }}
.ring-tips i:nth-child(n+31):hover::after {{ left: auto; right: calc(50% + 8px); }}
</style>"""


def grid(charts: Sequence[Chart], counts: Sequence[int] = ()) -> str:
    """The charts side by side, as many per row as there is room for; empty without charts.

    ``counts``: how many charts each grid of the page has, if it has several.
    """
    if not charts:
        return ""
    shown = "".join(
        f"<div class='ring-chart'>{_ZOOM * bool(one.curves.lines)}<div style='display:flex'>{_labels(one)}"
        "<div class='ring-frame' style='overflow-x:auto;flex:1;min-width:0'>"
        "<div class='ring-wide' style='position:relative;resize:horizontal;overflow:hidden'>"
        f"{_image(one)}<div class='ring-tips'>{tips(one)}</div></div></div></div></div>"
        for one in charts
    )
    return f"<div class='ring-charts {columns(counts or [len(charts)])}'>{shown}</div>"


def _image(chart: Chart) -> str:
    about = escape(
        f"{chart.title} over {chart.xlabel}: {chart.note if chart.curves.lines else 'no values yet'}", quote=True
    )
    return f"<img alt='{about}' width='100%' height='{HEIGHT}' src='{_address(svg(chart))}'>"


def _labels(chart: Chart) -> str:
    image, width = labels(chart)
    style = f"width:{width}px;height:{HEIGHT}px;flex:none"
    return f"<img class='ring-axis' alt='' style='{style}' src='{_address(image)}'>"


def _address(image: str) -> str:
    # As an image: front ends remove inline SVG from notebooks that are not trusted.
    return f"data:image/svg+xml;base64,{base64.b64encode(image.encode()).decode()}"
