"""The lines of a chart: one per rank, or their mean with a band, and the ranks that differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ring_notebook.notebook.colors import MEAN, rank_color
from ring_notebook.notebook.record.run_view import LOGICAL
from ring_notebook.notebook.record.series import Floats, Points, mean

MOST_LINES = 2  # ranks that are all drawn; of more, the mean is drawn, and a rank on demand
MOST_APART = 8  # as many as a host often has; more lines would hide the mean
GRID = 256  # points of a chart whose ranks logged at different steps
RANK = "rank"
WORDS = (RANK, LOGICAL)
BAND = "range"  # its label
DIFFERS = 4.0  # times the typical distance of a rank from the others
_NEAR = 0.75  # a rank that has made this share of the steps keeps up with the others
_MOST_MARKS = 60  # points of a validation that have marks; more would lie over each other
_LEAST_POINTS = 12  # with fewer points a difference may be noise


@dataclass(frozen=True)
class Line:
    """One line. A NaN in ``y`` is a gap. A click on the label draws a line that is not ``shown``.

    ``sparse``: values of a validation, drawn as a dashed line, with a mark for each point where these are few.
    ``raw``: the values that ``y`` is an average of, drawn faintly behind it.
    """

    label: str
    color: str
    x: Floats
    y: Floats
    shown: bool = True
    sparse: bool = False
    raw: Floats | None = None

    @property
    def marked(self) -> bool:
        """Whether each point has a mark. A single point would be invisible without."""
        return len(self.x) == 1 or (self.sparse and len(self.x) <= _MOST_MARKS)


@dataclass(frozen=True)
class Band:
    """The lowest and the highest of all ranks over ``x``."""

    x: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class Curves:
    """Lines and the band behind them. ``named``: even a single line needs its label."""

    lines: tuple[Line, ...]
    band: Band | None = None
    named: bool = False

    @property
    def drawn(self) -> tuple[Line, ...]:
        """The lines that are drawn without a click."""
        return tuple(line for line in self.lines if line.shown)

    @property
    def points(self) -> int:
        """The length of the longest line."""
        return max((len(line.x) for line in self.lines), default=0)


def per_rank(
    points: Mapping[int, Points], smooth: float = 0.0, chosen: Collection[int] = (), word: str = RANK
) -> Curves:
    """A line per rank. Of more than two ranks: their mean, a band from lowest to highest, and ranks that differ.

    ``word``, before the number of a rank in labels, is one of `WORDS`. ``chosen`` ranks are always drawn. With
    ``smooth`` (see `smoothed`) every line is an average, over its own values.
    """
    points = {rank: line for rank, line in points.items() if len(line.x)}
    if len(points) <= MOST_LINES:
        return Curves(
            tuple(
                _line(f"{word} {rank}", rank_color(rank), _array(line.x), _array(line.y), smooth)
                for rank, line in points.items()
            )
        )
    x, rows = _aligned(tuple(points.values()))
    ranks = tuple(points)
    even = smoothed(rows, smooth)
    apart = {ranks[index] for index in differing(even)} | set(chosen)
    raw = rows if smooth else [None] * len(rows)
    lines = [Line(f"mean of {len(ranks)}", MEAN, x, mean(even), raw=mean(rows) if smooth else None)]
    lines += [
        Line(f"{word} {rank}", rank_color(rank), x, row, rank in apart, raw=own)
        for rank, row, own in zip(ranks, even, raw, strict=True)
    ]
    return Curves(tuple(lines), Band(x, np.fmin.reduce(even), np.fmax.reduce(even)))


def many(lines: Mapping[str, Mapping[int, Points]], smooth: float = 0.0, order: Sequence[str] = ()) -> Curves:
    """A line per run or metric, the mean of its ranks, to compare them in one chart.

    ``order``: the runs of all charts of a page, so that each has one color in all of them.
    """
    places = order if set(lines) <= set(order) else list(lines)
    made = (mean_line(label, one, rank_color(places.index(label)), smooth) for label, one in lines.items())
    return Curves(tuple(made), named=len(order) > 1)


def mean_line(label: str, points: Mapping[int, Points], color: str, smooth: float = 0.0, sparse: bool = False) -> Line:
    x, rows = _aligned(tuple(points.values()))
    return _line(label, color, x, mean(rows), 0.0 if sparse else smooth, sparse)


def _line(label: str, color: str, x: Floats, y: Floats, smooth: float, sparse: bool = False) -> Line:
    return Line(label, color, x, smoothed(y, smooth), sparse=sparse, raw=y if smooth else None)


def differing(rows: Floats) -> tuple[int, ...]:
    """The rows whose second half clearly differs from most others', `MOST_APART` at most."""
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
    return tuple(int(whole[index]) for index in sorted(apart, key=lambda index: -distance[index])[:MOST_APART])


def smoothed(values: Floats, share: float) -> Floats:
    """The exponential average along the last axis, unbiased at its beginning. A NaN stays NaN and does not count.

    ``share`` is that of the previous value, as in TensorBoard's slider; with 0 the values themselves.
    """
    if not share:
        return values
    known = np.isfinite(values)
    columns = np.moveaxis(np.where(known, values, 0.0), -1, 0)
    result, total, weight = np.full(columns.shape, np.nan), np.zeros(columns.shape[1:]), np.zeros(columns.shape[1:])
    for at, (column, there) in enumerate(zip(columns, np.moveaxis(known, -1, 0), strict=True)):
        total = np.where(there, share * total + column, total)
        weight = np.where(there, share * weight + 1.0, weight)
        np.divide(total, weight, out=result[at : at + 1].reshape(total.shape), where=there)
    return np.moveaxis(result, 0, -1)


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
    if all(len(x) == 1 for x, _ in arrays):
        return np.mean([x for x, _ in arrays], axis=0), np.stack([y for _, y in arrays])
    begin, ends = min(x[0] for x, _ in arrays), [x[-1] for x, _ in arrays]
    # Up to where all ranks have been, unless one is far behind: where it ends, the mean of the others would jump.
    end = min(ends) if min(ends) - begin > _NEAR * (max(ends) - begin) else max(ends)
    grid = np.linspace(begin, end, GRID)
    return grid, np.stack([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in arrays])
