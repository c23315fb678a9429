"""The axes of a chart: their ranges and ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ring_notebook.notebook.panel.charts.curves import Curves, Floats
from ring_notebook.notebook.style import number, whole

__all__ = ["Scale", "scales"]


@dataclass(frozen=True)
class Scale:
    """One axis from ``low`` to ``high``."""

    low: float
    high: float

    @property
    def ticks(self) -> tuple[float, ...]:
        """At most six round numbers on the axis, a step of 1, 2 or 5 times a power of ten apart."""
        width = self.high - self.low
        power = 10.0 ** math.floor(math.log10(width / 5))
        step = next(power * factor for factor in (1, 2, 5, 10) if width / (power * factor) <= 5)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return tuple(float(f"{index * step:.12g}") for index in range(first, last + 1))

    @staticmethod
    def label(tick: float) -> str:
        """The text at a tick."""
        return whole(tick) if abs(tick) >= 1000 else number(tick)


def scales(curves: Curves, from_zero: bool) -> tuple[Scale, Scale]:
    """The x and y axes that contain all of ``curves``; ``from_zero`` starts y at 0."""
    rows = curves.rows if curves.band is None else np.concatenate([curves.rows, curves.band])
    x, y = _scale(curves.x, False), _scale(rows, from_zero)
    room = (y.high - y.low) * 0.05
    return x, Scale(y.low if from_zero else y.low - room, y.high + room)


def _scale(values: Floats, from_zero: bool) -> Scale:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return Scale(0.0, 1.0)
    low, high = float(finite.min()), float(finite.max())
    if from_zero:
        low = min(low, 0.0)
    if low == high:
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    return Scale(low, high)
