"""A live chart: an ECharts widget, with hover, zoom, and ranks that a click on the legend shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from ipecharts import EChartsRawWidget

from ring_notebook.notebook.colors import CHANGED, GREY, RED
from ring_notebook.notebook.panel.charts.axes import Scale, margin
from ring_notebook.notebook.panel.charts.chart import Chart
from ring_notebook.notebook.panel.charts.curves import BAND, WORDS, Band, Line
from ring_notebook.notebook.panel.charts.svg_chart import BOTTOM, HEIGHT, NEAR, RAW, TOP
from ring_notebook.notebook.record.series import Floats

_LEGEND = "88%"  # of the width, beside the labels of the y axis
_RIGHT = 16  # pixels, so that neither a mark nor a label at the end is cut
_POINT, _STYLE = 18, 180  # bytes of a point, and of the style of a series, in a message
_BAR, _BOX = "path://M0 4H12V8H0Z M0 0 M12 12", "path://M0 2H12V10H0Z M0 0 M12 12"  # before a label


class LiveChart:
    """One figure; `draw` shows a new `Chart`. ``widget`` is what a page shows.

    ``on_click(rank)`` is called when the label of a rank is clicked.
    """

    def __init__(self, on_click: Callable[[int], None] = lambda _rank: None) -> None:
        self._on_click = on_click
        self._drawn: Chart | None = None
        self._series: dict[str, dict[str, Any]] = {}
        self._sent = 0
        self.widget = EChartsRawWidget(
            option={}, style={"width": "100%", "height": f"{HEIGHT}px"}, layout={"width": "100%", "min_width": "0"}
        )
        self.widget.on("legendselectchanged", None, self._clicked)

    def draw(self, chart: Chart) -> int:
        """Show ``chart``, unless it is already shown. Returns about how many bytes were sent."""
        if (chart.curves.points < 1 and self._drawn is not None) or _same(chart, self._drawn):
            return 0
        self._drawn = chart
        option = self._option(chart)
        self.widget.option = option
        return sum(_POINT * len(one.get("data", ())) + _STYLE for one in option["series"])

    def _clicked(self, event: dict[str, Any]) -> None:
        if (rank := _number(str(event.get("name", "")))).isdecimal():
            self._on_click(int(rank))

    def _option(self, chart: Chart) -> dict[str, Any]:
        lines = chart.curves.lines
        # Drawn lines come first: a narrow page shows the first labels, and the others behind an arrow.
        ordered = sorted(lines, key=lambda line: not line.shown)
        labels: list[Any] = [_name(line) for line in ordered] if len(lines) > 1 else []
        series = {f"{line.label} raw": _raw(line) for line in lines if line.raw is not None and line.shown}
        series |= {line.label: _line(line) for line in lines}
        if chart.curves.band is not None:
            series = {BAND: _band(chart.curves.band, lines[0].color), **series}
            swatch = {"name": BAND, "icon": _BOX, "itemStyle": {"opacity": 0.3}}
            labels.insert(sum(line.shown for line in lines), swatch)
        x, y = chart.scales
        series["marks"] = _marks(chart, x)
        # The page merges a new option into the old one: a series that is left out would stay.
        gone = {name: {**old, "data": []} for name, old in self._series.items() if name not in series}
        self._series = series | gone
        left = margin(y, chart.values, chart.unit)
        small = {"fontSize": 11, "color": GREY}
        label = {**small, "hideOverlap": True, "show": bool(lines)}  # an empty chart has no values yet
        faint = {"lineStyle": {"color": GREY, "opacity": 0.22}}
        return {
            "animation": False,
            "backgroundColor": "transparent",
            "title": {
                "text": f"{{title|{chart.heading}}}  {chart.note}",
                "left": left,
                "top": 4,
                "padding": 0,
                "textStyle": {**small, "fontWeight": 400, "rich": {"title": {"fontSize": 13, "fontWeight": 600}}},
            },
            "grid": {"left": left, "right": _RIGHT, "top": TOP, "bottom": BOTTOM},
            "legend": {
                "type": "scroll",
                "data": labels,
                "selected": {_name(line): line.shown for line in lines},
                "left": left,
                "width": _LEGEND,
                "top": 16,
                "padding": [4, 0],
                "itemGap": 7,
                "icon": _BAR,
                "itemWidth": 10,
                "itemHeight": 12,
                "inactiveColor": "#8791a070",
                "textStyle": {**small, "lineHeight": 15},  # higher than the text, else it would be cut
                # Only the arrows. ECharts ignores an empty text, and always leaves room for "xx/xx".
                "pageFormatter": " ",
                "pageTextStyle": {"fontSize": 1},
                "pageIconSize": 9,
                "pageIconColor": GREY,
                "pageIconInactiveColor": "#8791a050",
                "pageButtonGap": 6,
            },
            "toolbox": {
                "right": 0,
                "bottom": -5,
                "itemSize": 11,
                "itemGap": 6,
                "iconStyle": {"borderColor": GREY},
                "feature": {
                    "dataZoom": {"title": {"zoom": "zoom: drag over the chart", "back": "zoom back"}},
                    "restore": {"title": "show all"},
                },
            },
            "tooltip": {
                "trigger": "axis",
                "confine": True,
                "axisPointer": {"type": "line", "label": {"precision": chart.digits, "formatter": _place(chart)}},
                "backgroundColor": "rgba(31,41,55,.94)",
                "borderWidth": 0,
                "textStyle": {"fontSize": 11, "color": "#f3f4f6"},
                "padding": [4, 8],
            },
            "xAxis": {
                "type": "value",
                "name": chart.unit,
                "nameLocation": "start",
                "nameGap": 6,
                "nameTextStyle": {**small, "align": "right", "verticalAlign": "top", "padding": [9, 0, 0, 0]},
                "min": x.low,
                "max": x.high,
                "minInterval": x.least,
                "splitNumber": 4,  # with more, labels touch each other on a narrow page
                "splitLine": {"show": False},
                "axisLine": {"show": False, "onZero": False},
                "axisTick": {"show": False},
                "axisLabel": {**label, "showMinLabel": False, "showMaxLabel": False},
            },
            "yAxis": {
                "type": "log" if y.log else "value",
                "name": chart.values,
                "nameGap": 8,
                "nameTextStyle": {**small, "align": "right", "padding": [0, 6, 0, 0]},
                # As in the report; ECharts would take powers of ten for a logarithmic axis.
                "min": y.low,
                "max": y.high,
                **({} if y.log else {"interval": y.step}),
                "splitLine": faint,
                "axisLine": {"show": False},
                "axisTick": {"show": False},
                "axisLabel": {**label, "margin": 6},
            },
            "series": [{"id": name, "name": name, **one} for name, one in self._series.items()],
        }


def _place(chart: Chart) -> str:
    """The first line under the mouse: the place on the x axis, and the unit of the values below."""
    unit = f" · {chart.values}" if chart.values else ""
    return f"{chart.xlabel} {{value}}{unit}"


def _name(line: Line) -> str:
    """The label of a line; only the number for a rank that is drawn on a click, because there may be many."""
    return line.label if line.shown else _number(line.label)


def _number(label: str) -> str:
    """The number of a rank in the label of its line; any other label itself."""
    word, _, number = label.partition(" ")
    return number if word in WORDS and number.isdecimal() else label


def _line(line: Line) -> dict[str, Any]:
    if not line.shown:  # only its label
        return {"name": _name(line), "type": "line", "data": [], "color": line.color}
    return {
        "name": _name(line),
        "type": "line",
        "data": _pairs(line.x, line.y),
        "color": line.color,
        "showSymbol": line.marked,
        "symbol": "circle",
        "symbolSize": 6,
        "lineStyle": {"width": 1.8, "type": "dashed" if line.sparse else "solid"},
        "emphasis": {"disabled": True},
    }


def _raw(line: Line) -> dict[str, Any]:
    """The values behind a smooth line, without a label, and without values under the mouse."""
    assert line.raw is not None
    return {
        "type": "line",
        "data": _pairs(line.x, line.raw),
        "color": line.color,
        "showSymbol": False,
        "lineStyle": {"width": 1, "opacity": RAW},
        "emphasis": {"disabled": True},
        "tooltip": {"show": False},
        "silent": True,
    }


def _band(band: Band, color: str) -> dict[str, Any]:
    """An invisible line along the highest values and back along the lowest; its inside is filled.

    Stacked areas, the usual way, also stack the steps if the x axis has numbers.
    """
    there = np.isfinite(band.low) & np.isfinite(band.high)
    return {
        "type": "line",
        "data": [*_pairs(band.x[there], band.high[there]), *_pairs(band.x[there], band.low[there])[::-1]],
        "color": color,
        "showSymbol": False,
        "symbol": "none",
        "lineStyle": {"opacity": 0},
        "areaStyle": {"opacity": 0.2},
        "emphasis": {"disabled": True},
    }


def _marks(chart: Chart, x: Scale) -> dict[str, Any]:
    """The best point, the epochs, changes of knobs, and NaN or infinity, on a series without a line."""
    epochs = [
        {
            "xAxis": mark.x,
            "label": {
                "show": not chart.broken,
                "formatter": f"epoch {mark.label}" if index == 0 else mark.label,
                **({"align": "right"} if index == 0 and x.place(mark.x) > 1 - NEAR else {}),
            },
        }
        for index, mark in enumerate(chart.some_epochs)
    ]
    red = {"color": RED}
    broken = [
        {
            "xAxis": mark.x,
            "lineStyle": {**red, "type": "solid", "width": 1.5, "opacity": 1},
            "label": {**red, "show": bool(mark.label), "formatter": mark.label, "fontSize": 11, "distance": 2},
        }
        for mark in chart.broken
    ]
    violet = {"color": CHANGED}
    changes = [
        {
            "xAxis": mark.x,
            "lineStyle": {**violet, "type": "solid", "width": 1.2, "opacity": 0.8},
            "label": {
                **violet,
                "show": bool(mark.label),
                "formatter": mark.label,
                "position": "insideEndTop",
                "fontSize": 10,
            },
        }
        for mark in chart.changes
    ]
    best = [list(chart.best)] if chart.best is not None else []
    return {
        "type": "scatter",
        "data": best,
        "symbolSize": 9,
        "itemStyle": {"color": "transparent", "borderColor": GREY, "borderWidth": 2},
        "tooltip": {"show": False},
        "silent": True,
        "markLine": {
            "silent": True,
            "symbol": "none",
            "animation": False,
            "lineStyle": {"color": GREY, "opacity": 0.6, "type": "dashed"},
            # By default a label has the opacity of its line, which is too faint to read.
            "label": {"color": GREY, "opacity": 1, "fontSize": 9, "position": "end", "distance": 2},
            "data": epochs + changes + broken,
        },
    }


def _pairs(x: Floats, y: Floats) -> list[list[float | None]]:
    """Points in five digits, more than a page can show; a value that is not finite is a gap."""
    return [
        [_short(a, 7), _short(b) if math.isfinite(b) else None] for a, b in zip(x.tolist(), y.tolist(), strict=True)
    ]


def _short(value: float, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}")


def _same(one: Chart, other: Chart | None) -> bool:
    """Whether both charts look the same."""
    if other is None or replace(one, curves=other.curves) != other or len(one.curves.lines) != len(other.curves.lines):
        return False
    pairs = zip(one.curves.lines, other.curves.lines, strict=True)
    return all(a.label == b.label and a.shown == b.shown and _equal(_values(a), _values(b)) for a, b in pairs)


def _values(line: Line) -> list[Floats]:
    return [line.x, line.y, line.y if line.raw is None else line.raw]


def _equal(one: Iterable[Floats], other: Iterable[Floats]) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))
