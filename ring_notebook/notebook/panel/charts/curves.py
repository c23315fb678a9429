"""The lines of a chart: one per rank, or their mean with a band, and the ranks that differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ring_notebook.notebook.record.series import Points
from ring_notebook.notebook.style import MEAN, rank_color

MOST_LINES = 2  # ranks that are all drawn; of more ranks the mean is drawn, and each one on demand
GRID = 256  # points of a chart whose ranks logged at different steps
SMOOTHING = 0.9  # the share of the previous value, as in TensorBoard's slider
BAND = "range"  # its label
DIFFERS = 4.0  # times the typical distance of a rank from the others
_NEAR = 0.75  # the share of the steps that a rank has made which keeps up with the others
_LEAST_POINTS = 12  # with fewer points a difference may be noise
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """One line. A NaN in ``y`` is a gap. A click on the label draws a line that is not ``shown``.

    ``sparse``: values of a validation, with a mark for each point and a dashed line.
    """

    label: str
    color: str
    x: Floats
    y: Floats
    shown: bool = True
    sparse: bool = False


@dataclass(frozen=True)
class Band:
    """The lowest and the highest of all ranks over ``x``."""

    x: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class Curves:
    """Lines and the band behind them."""

    lines: tuple[Line, ...]
    band: Band | None = None

    @property
    def drawn(self) -> tuple[Line, ...]:
        """The lines that are drawn without a click."""
        return tuple(line for line in self.lines if line.shown)

    @property
    def points(self) -> int:
        """The length of the longest line."""
        return max((len(line.x) for line in self.lines), default=0)


def per_rank(points: Mapping[int, Points], smooth: bool = False, chosen: Collection[int] = ()) -> Curves:
    """A line per rank. Of more than two ranks: their mean, a band from lowest to highest, and ranks that differ.

    ``chosen`` ranks are always drawn. With ``smooth`` every line is an exponential average.
    """
    points = {rank: line for rank, line in points.items() if len(line.x)}
    if len(points) <= MOST_LINES:
        return Curves(tuple(_rank_line(rank, line, smooth) for rank, line in points.items()))
    x, rows = _aligned(tuple(points.values()))
    if smooth:
        rows = np.stack([smoothed(row) for row in rows])
    ranks = tuple(points)
    apart = {ranks[index] for index in differing(rows)} | set(chosen)
    lines = [Line(f"mean of {len(ranks)}", MEAN, x, mean(rows))]
    lines += [
        Line(f"rank {rank}", rank_color(rank), x, row, rank in apart) for rank, row in zip(ranks, rows, strict=True)
    ]
    return Curves(tuple(lines), Band(x, np.fmin.reduce(rows), np.fmax.reduce(rows)))


def many(runs: Mapping[str, Mapping[int, Points]]) -> Curves:
    """A line per run, the mean of its ranks, to compare runs in one chart."""
    lines = [mean_line(label, points, rank_color(index)) for index, (label, points) in enumerate(runs.items())]
    return Curves(tuple(lines))


def mean_line(label: str, points: Mapping[int, Points], color: str, smooth: bool = False, sparse: bool = False) -> Line:
    """The mean of the ranks as one line."""
    x, rows = _aligned(tuple(points.values()))
    y = mean(rows)
    return Line(label, color, x, smoothed(y) if smooth and not sparse else y, sparse=sparse)


def differing(rows: Floats) -> tuple[int, ...]:
    """At most two rows whose second half clearly differs from that of the others."""
    half = rows[:, rows.shape[1] // 2 :]
    whole = np.flatnonzero(np.isfinite(half).all(axis=1))
    half = half[whole]
    if len(whole) <= MOST_LINES or half.shape[1] < _LEAST_POINTS:
        return ()
    usual = np.median(half, axis=0)
    distance = np.median(np.abs(half - usual), axis=1)
    typical = float(np.median(distance))
    height = float(half.max() - half.min())
    apart = np.flatnonzero((distance > DIFFERS * typical) & (distance > 0.05 * height))
    return tuple(int(whole[index]) for index in sorted(apart, key=lambda index: -distance[index])[:2])


def smoothed(values: Floats) -> Floats:
    """The exponential average of values, unbiased at its beginning. A NaN stays NaN and does not count."""
    result, total, weight = np.full(len(values), np.nan), 0.0, 0.0
    for index, value in enumerate(values):
        if np.isfinite(value):
            total, weight = SMOOTHING * total + value, SMOOTHING * weight + 1.0
            result[index] = total / weight
    return result


def _rank_line(rank: int, points: Points, smooth: bool) -> Line:
    x, y = _array(points.x), _array(points.y)
    return Line(f"rank {rank}", rank_color(rank), x, smoothed(y) if smooth else y)


def mean(rows: Floats) -> Floats:
    """The mean of the rows that have a number there; NaN if none has."""
    known = np.isfinite(rows)
    count = known.sum(axis=0)
    total = np.where(known, rows, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _array(values: Any) -> Floats:
    return np.asarray(values, dtype=float)


def _aligned(lines: Sequence[tuple[Any, Any]]) -> tuple[Floats, Floats]:
    """The lines on one x axis: their own if they share it, else a grid."""
    arrays = [(_array(x), _array(y)) for x, y in lines]
    arrays = [(x, y) for x, y in arrays if len(x)]
    if not arrays:
        return np.empty(0), np.empty((len(lines), 0))
    first = arrays[0][0]
    if all(np.array_equal(first, x) for x, _ in arrays):
        return first, np.stack([y for _, y in arrays])
    begin, ends = min(x[0] for x, _ in arrays), [x[-1] for x, _ in arrays]
    # Up to where all ranks have been, unless one is far behind: the mean of those ahead would jump at its end.
    end = min(ends) if min(ends) - begin > _NEAR * (max(ends) - begin) else max(ends)
    grid = np.linspace(begin, end, GRID)
    return grid, np.stack([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in arrays])
