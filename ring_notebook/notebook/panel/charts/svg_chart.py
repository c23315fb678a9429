"""A still chart: curves as SVG text, for saved notebooks, where no widget is alive."""

from __future__ import annotations

import math
from html import escape

import numpy as np

from ring_notebook.notebook.panel.charts.axes import scales
from ring_notebook.notebook.panel.charts.curves import Curves, Floats
from ring_notebook.notebook.style import GREY

__all__ = ["line_chart"]

WIDTH, HEIGHT = 360, 230  # pixels
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 36, 34  # margins
FONT = "font-family='system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif'"


def line_chart(title: str, curves: Curves, xlabel: str, from_zero: bool = False) -> str:
    """The curves with axes, grid and legend. Its colors suit light and dark pages."""
    x_scale, y_scale = scales(curves, from_zero)

    def sx(value: float) -> float:
        return LEFT + (value - x_scale.low) / (x_scale.high - x_scale.low) * (WIDTH - LEFT - RIGHT)

    def sy(value: float) -> float:
        return TOP + (y_scale.high - value) / (y_scale.high - y_scale.low) * (HEIGHT - TOP - BOTTOM)

    def path(x: Floats, y: Floats) -> str:
        pieces, gap = [], True
        for one_x, one_y in zip(x, y, strict=True):
            if math.isfinite(one_y):
                pieces.append(f"{'M' if gap else 'L'}{sx(one_x):.1f} {sy(one_y):.1f}")
            gap = not math.isfinite(one_y)
        return "".join(pieces)

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' "
        f"viewBox='0 0 {WIDTH} {HEIGHT}' {FONT} font-size='11' fill='{GREY}'>",
        f"<text x='{LEFT}' y='14' font-size='13' font-weight='600'>{escape(title)}</text>",
    ]
    for tick in y_scale.ticks:
        y = sy(tick)
        parts.append(
            f"<path d='M{LEFT} {y:.1f}H{WIDTH - RIGHT}' stroke='{GREY}' stroke-opacity='.25'/>"
            f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{y_scale.label(tick)}</text>"
        )
    for tick in x_scale.ticks:
        anchor = f"x='{sx(tick):.1f}' y='{HEIGHT - BOTTOM + 15}' text-anchor='middle'"
        parts.append(f"<text {anchor}>{x_scale.label(tick)}</text>")
    parts.append(f"<text x='{WIDTH - RIGHT}' y='{HEIGHT - 4}' text-anchor='end'>{escape(xlabel)}</text>")
    if curves.band is not None:
        there = np.isfinite(curves.band).all(axis=0)
        around_x = np.concatenate([curves.x[there], curves.x[there][::-1]])
        around_y = np.concatenate([curves.band[0, there], curves.band[1, there][::-1]])
        parts.append(f"<path d='{path(around_x, around_y)}Z' fill='{curves.colors[0]}' fill-opacity='.2'/>")
    for row, color in zip(curves.rows, curves.colors, strict=True):
        parts.append(
            f"<path d='{path(curves.x, row)}' fill='none' stroke='{color}' stroke-width='1.6' stroke-linejoin='round'/>"
        )
    parts += [*_legend(curves), "</svg>"]
    return "".join(parts)


def _legend(curves: Curves) -> list[str]:
    parts, x = [], LEFT
    for label, color in zip(curves.labels, curves.colors, strict=True):
        parts.append(
            f"<path d='M{x} 25h10' stroke='{color}' stroke-width='3'/>"
            f"<text x='{x + 13}' y='29' font-size='10'>{escape(label)}</text>"
        )
        x += 20 + 6 * len(label)
    if curves.band is not None:
        parts.append(f"<text x='{x}' y='29' font-size='10'>band: lowest to highest</text>")
    return parts
