"""A live chart: one metric in a bqplot widget, which gets only the numbers that have changed."""

from __future__ import annotations

import numpy as np
from bqplot import Axis, Figure, LinearScale, Lines

from ring_notebook.notebook.panel.charts.axes import scales
from ring_notebook.notebook.panel.charts.curves import Curves

__all__ = ["Chart"]

_MARGIN = {"top": 28, "bottom": 36, "left": 52, "right": 14}


class Chart:
    """One figure; `draw` shows new curves. ``figure`` is the widget. ``from_zero`` starts the y axis at 0."""

    def __init__(self, title: str, xlabel: str, from_zero: bool = False) -> None:
        self._from_zero = from_zero
        self._scales = {"x": LinearScale(), "y": LinearScale()}
        self._band = Lines(x=[], y=[], scales=self._scales, fill="between", stroke_width=0)
        self._lines = Lines(x=[], y=[], scales=self._scales, stroke_width=1.8)
        self._axes = [
            Axis(
                scale=self._scales["x"],
                label=xlabel,
                grid_lines="none",
                tick_format=",~g",
                label_offset="30px",
            ),
            Axis(scale=self._scales["y"], orientation="vertical", tick_format=",~g"),
        ]
        self._drawn: Curves | None = None
        self.figure = Figure(
            title=title,
            marks=[self._band, self._lines],
            axes=self._axes,
            fig_margin=_MARGIN,
            padding_y=0,
            display_toolbar=False,
            layout={"height": "230px", "width": "330px", "flex": "0 0 auto"},
        )

    def draw(self, curves: Curves) -> None:
        """Show ``curves``, from two points on; sends nothing when they are those already shown."""
        # bqplot squeezes what it is given: rows of one point would become a single row, or no array at all.
        if len(curves.x) < 2 or curves.same(self._drawn):
            return
        self._drawn = curves
        for scale, axis, wanted in zip(self._scales.values(), self._axes, scales(curves, self._from_zero), strict=True):
            with scale.hold_sync():
                scale.min, scale.max = wanted.low, wanted.high
            axis.tick_values = list(wanted.ticks)
        with self._lines.hold_sync():
            self._lines.colors = list(curves.colors)
            self._lines.x, self._lines.y = curves.x, curves.rows
        if curves.band is not None and (there := np.isfinite(curves.band).all(axis=0)).sum() > 1:
            with self._band.hold_sync():
                self._band.fill_colors, self._band.fill_opacities = [curves.colors[0]], [0.2]
                self._band.x, self._band.y = curves.x[there], curves.band[:, there]
