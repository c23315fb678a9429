"""The axes of a chart: their ranges and ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ring_notebook.notebook.panel.charts.curves import Curves
from ring_notebook.notebook.record.series import Floats
from ring_notebook.notebook.style import number, whole

_SAME = 1e-6  # of a value: the ranks may differ in its last bit
_DIGITS = 1e4  # in which `number` shows a value
_CHARACTER, _GAP, _LEAST = 7.0, 6, 30  # pixels: per character, from label to axis, for a short name of the x axis


@dataclass(frozen=True)
class Scale:
    """One axis from ``low`` to ``high``; ``log``: a logarithmic one; ``least``: the least distance of two ticks."""

    low: float
    high: float
    log: bool = False
    least: float = 0.0

    def place(self, value: float) -> float:
        """The position of a value on the axis: 0 at its beginning, 1 at its end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> tuple[float, ...]:
        """At most six round numbers on the axis: 1, 2 or 5 times a power of ten apart, or powers of ten."""
        if self.log:
            return self._powers() or (self.low, self.high)
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        return tuple(float(f"{index * self.step:.12g}") for index in range(first, last + 1))

    @property
    def finer_ticks(self) -> tuple[float, ...]:
        """Round numbers between the ticks of a linear axis, for a wide picture: four or five times as many in total."""
        if self.log:
            return ()
        step = max(self.least, _step(self.step))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        every = (float(f"{index * step:.12g}") for index in range(first, last + 1))
        return tuple(tick for tick in every if tick not in self.ticks)

    @property
    def step(self) -> float:
        """The distance of two ticks on a linear axis."""
        return max(self.least, _step(self.high - self.low))

    def _powers(self) -> tuple[float, ...]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        every = 1 + (last - first) // 8
        factors = (1, 2, 5) if last - first <= 2 else (1,)
        found = [10.0**power * factor for power in range(first, last + 1, every) for factor in factors]
        return tuple(tick for tick in found if self.low <= tick <= self.high)

    def label(self, tick: float) -> str:
        """The text at a tick, with the digits that tell it from the next one."""
        if not self.log and max(abs(self.low), abs(self.high)) >= _DIGITS * self.step:
            return f"{tick:,.{max(0, -math.floor(math.log10(self.step) + 1e-9))}f}"
        return whole(tick) if 1000 <= abs(tick) < 1e12 else number(tick)  # those with an exponent are short


def margin(y: Scale, *units: str) -> int:
    """Pixels that the labels of the y axis, and the units of both axes, need at the left of a chart."""
    ticks = [_plain(tick, y.log) for tick in ((y.low, *y.ticks, y.high) if y.log else y.ticks)]
    widest = max(len(one) + one.count("+") for one in [*units, *ticks])  # which is wider than a digit
    return max(_LEAST, _GAP + round(_CHARACTER * widest))


def _plain(tick: float, log: bool) -> str:
    """A tick as a live chart writes it, with exponents of small numbers on a logarithmic axis only."""
    if abs(tick) >= 1e21:  # JavaScript writes all others with all digits
        return f"{tick:.4g}"
    return f"{tick:.0e}" if log and tick < 1e-6 else f"{tick:,.12f}".rstrip("0").rstrip(".")


def scales(
    curves: Curves, from_zero: bool, log: bool = False, best: tuple[float, float] | None = None
) -> tuple[Scale, Scale]:
    """The x and y axes that contain all drawn ``curves`` and the ``best`` point; ``from_zero`` starts y at 0.

    ``log``: the y axis is logarithmic, for curves as `for_log_axis` makes them.
    """
    drawn = curves.drawn
    rows = [line.y for line in drawn]
    if curves.band is not None and drawn:
        rows += [curves.band.low, curves.band.high]
    places = [line.x for line in drawn if len(line.x)]
    if best is not None:  # the best step may lie outside of a long curve, whose points are means
        places, rows = [*places, np.asarray(best[:1])], [*rows, np.asarray(best[1:])]
    x, y = _along(places), _scale(rows, from_zero)
    if all((line.x == np.round(line.x)).all() for line in drawn):  # steps and ranks: there is no step 0.5
        x = replace(x, least=1.0)
    return x, _rounded_log(y) if log and y.low > 0 else _rounded(y)


def for_log_axis(curves: Curves) -> Curves | None:
    """The curves with gaps in place of zeros; None where a value is negative or none is positive: keep y linear."""
    band = curves.band
    values = _finite([line.y for line in curves.lines] + ([band.low, band.high] if band is not None else []))
    if not values.size or values.min() < 0 or values.max() <= 0:
        return None

    def positive(values: Floats, instead: float = math.nan) -> Floats:
        return np.where(values == 0, instead, values)

    lines = tuple(
        replace(line, y=positive(line.y), raw=None if line.raw is None else np.where(line.raw > 0, line.raw, np.nan))
        for line in curves.lines
    )
    if band is not None:
        band = replace(band, low=positive(band.low, values[values > 0].min()), high=positive(band.high))
    return replace(curves, lines=lines, band=band)


def _finite(arrays: Sequence[Floats]) -> Floats:
    values = np.concatenate(arrays) if arrays else np.empty(0)
    return values[np.isfinite(values)]


def _rounded(scale: Scale) -> Scale:
    """The axis widened to ticks at both ends; as it is longer, its ticks may be further apart."""
    step = _step(scale.high - scale.low)
    low, high = math.floor(scale.low / step + 1e-9) * step, math.ceil(scale.high / step - 1e-9) * step
    made = Scale(float(f"{low:.12g}"), float(f"{high:.12g}"))
    return made if made.step == step else _rounded(made)


def _rounded_log(scale: Scale) -> Scale:
    """The logarithmic axis between two of 1, 2 and 5 times a power of ten."""
    low, high = (10.0 ** math.floor(math.log10(value)) for value in (scale.low, scale.high))
    low *= max(factor for factor in (1, 2, 5) if low * factor <= scale.low * (1 + 1e-9))
    high *= min(factor for factor in (1, 2, 5, 10) if high * factor >= scale.high * (1 - 1e-9))
    return Scale(float(f"{low:.3g}"), float(f"{high:.3g}"), log=True)


def _step(width: float) -> float:
    power = 10.0 ** math.floor(math.log10(width / 5))
    return float(f"{next(power * factor for factor in (1, 2, 5, 10) if width / (power * factor) <= 5 + 1e-9):.12g}")


def _scale(arrays: list[Floats], from_zero: bool) -> Scale:
    finite = _finite(arrays)
    if not finite.size:
        return Scale(0.0, 1.0)
    low, high = float(finite.min()), float(finite.max())
    if from_zero:
        low = min(low, 0.0)
        high = high if high > low else low + 1.0
    if high - low <= _SAME * max(abs(low), abs(high)):
        least, most = (0.0, 1.0) if 0 <= low <= high <= 1 else (-math.inf, math.inf)  # it may be a share
        low, high = max(least, low - (abs(low) / 2 or 0.5)), min(most, high + (abs(high) / 2 or 0.5))
    return Scale(low, high)


def _along(places: list[Floats]) -> Scale:
    """The x axis: from the first place to the last; around a single one half a step on both sides."""
    low, high = min((one[0] for one in places), default=0.0), max((one[-1] for one in places), default=1.0)
    return Scale(float(low), float(high)) if low < high else Scale(float(low) - 0.5, float(high) + 0.5)
