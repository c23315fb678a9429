"""The lines of a chart: one per rank, or mean and band above eight ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ring_notebook.notebook.record.series import Points
from ring_notebook.notebook.style import BAND, rank_color

__all__ = ["MOST_LINES", "Curves", "many", "per_rank"]

MOST_LINES = 8
GRID = 256  # points of a chart whose ranks logged at different steps
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curves:
    """Lines over one x axis: ``rows`` has a row per label. A NaN is a gap. ``band`` is (lowest, highest)."""

    x: Floats
    rows: Floats
    labels: tuple[str, ...]
    colors: tuple[str, ...]
    band: Floats | None = None

    def same(self, other: Any) -> bool:
        """Whether drawing the other one would show the same."""
        return (
            isinstance(other, Curves)
            and self.labels == other.labels
            and np.array_equal(self.x, other.x)
            and np.array_equal(self.rows, other.rows, equal_nan=True)
        )


def per_rank(points: Mapping[int, Points]) -> Curves:
    """A line per rank; above eight ranks their mean, and a band from the lowest to the highest."""
    x, rows = _aligned(tuple(points.values()))
    if len(points) <= MOST_LINES:
        ranks = tuple(points)
        return Curves(x, rows, tuple(f"rank {rank}" for rank in ranks), tuple(map(rank_color, ranks)))
    band = np.stack([np.fmin.reduce(rows), np.fmax.reduce(rows)])
    return Curves(x, _mean(rows)[None], (f"mean of {len(points)} ranks",), (BAND,), band)


def many(runs: Mapping[str, Mapping[int, Points]]) -> Curves:
    """A line per run, the mean of its ranks, to compare runs in one chart."""
    means = []
    for points in runs.values():
        x, rows = _aligned(tuple(points.values()))
        means.append((x, _mean(rows)))
    x, rows = _aligned(means)
    return Curves(x, rows, tuple(runs), tuple(rank_color(index) for index in range(len(runs))))


def _mean(rows: Floats) -> Floats:
    known = np.isfinite(rows)
    count = known.sum(axis=0)
    total = np.where(known, rows, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _aligned(lines: Sequence[tuple[Any, Any]]) -> tuple[Floats, Floats]:
    """The lines on one x axis: their own where they share it, else a grid."""
    arrays = [(np.asarray(x, dtype=float), np.asarray(y, dtype=float)) for x, y in lines]
    arrays = [(x, y) for x, y in arrays if len(x)]
    if not arrays:
        return np.empty(0), np.empty((len(lines), 0))
    first = arrays[0][0]
    if all(np.array_equal(first, x) for x, _ in arrays):
        return first, np.stack([y for _, y in arrays])
    grid = np.linspace(min(x[0] for x, _ in arrays), max(x[-1] for x, _ in arrays), GRID)
    return grid, np.stack([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in arrays])
