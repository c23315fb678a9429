"""Curves in bounded memory: a metric or a throughput is averaged into fewer points as its values arrive.

The best and the newest value of a metric are of one step each, not averaged over steps: `Extremes`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_SETTLED, _HELD = 512, 8192  # rows of a rank that `Extremes` keeps if several ranks log a metric, and at most


class Points(NamedTuple):
    """A curve as two arrays of equal length, which never change, so that it can be a key of caches."""

    x: array[float]
    y: array[float]

    def __hash__(self) -> int:
        return hash((len(self.x), *self.x[-1:]))  # arrays have none; few curves have the same end


class Series:
    """The values of one metric on one rank as at most ``limit`` points.

    Every point is the mean of ``stride`` consecutive values. When there are ``limit`` points, neighbours are joined and
    the stride doubles: a long run keeps between ``limit / 2`` and ``limit`` points. Without ``every``, values of the
    same step (batches whose gradients are accumulated) are drawn as one.
    """

    __slots__ = ("_every", "_limit", "_pending", "_points", "_stride", "_sum_x", "_sum_y", "_x", "_y")

    def __init__(self, limit: int = 400, every: bool = False) -> None:
        if limit < 2 or limit % 2:
            raise ValueError(f"limit={limit}: expected an even number of at least 2")
        self._limit = limit
        self._every = every
        self._stride = 1
        self._x: array[float] = array("d")
        self._y: array[float] = array("d")
        self._sum_x = self._sum_y = 0.0
        self._pending = 0
        self._points: Points | None = None

    def extend(self, x: Sequence[float], y: Sequence[float]) -> None:
        """Take in values in the order of the log. A NaN makes its own point NaN: a gap in the curve."""
        self._points = None
        start = 0
        while start < len(x):
            # Up to the end of the point in progress, or as many whole points as there is space for.
            space = 1 if self._pending else self._limit - len(self._x)
            end = min(len(x), start + space * self._stride - self._pending)
            self._add(x[start:end], y[start:end])
            start = end

    def _add(self, x: Sequence[float], y: Sequence[float]) -> None:
        """Take in values that complete the point in progress at most, or begin with a new one and do not overflow."""
        whole = 0 if self._pending else len(x) // self._stride
        if whole:
            used = whole * self._stride
            self._x.extend(_means(x[:used], self._stride))
            self._y.extend(_means(y[:used], self._stride))
            x, y = x[used:], y[used:]
        self._sum_x += sum(x)
        self._sum_y += sum(y)
        self._pending += len(x)
        if self._pending == self._stride:
            self._x.append(self._sum_x / self._stride)
            self._y.append(self._sum_y / self._stride)
            self._sum_x = self._sum_y = 0.0
            self._pending = 0
        if len(self._x) == self._limit:
            self._x, self._y = _halved(self._x), _halved(self._y)
            self._stride *= 2

    def points(self) -> Points:
        """A copy of the curve up to the newest value, the same object until another one comes."""
        if self._points is None:
            x, y = self._x[:], self._y[:]
            if self._pending:
                x.append(self._sum_x / self._pending)
                y.append(self._sum_y / self._pending)
            self._points = Points(x, y) if self._every else _one_per_step(x, y)
        return self._points


class Extreme(NamedTuple):
    """The mean over ranks that a metric had at a step."""

    step: float
    value: float


class Extremes:
    """The least, the greatest and the newest mean over ranks that a metric had at one step, however long the run is.

    A step counts once all ranks that log the metric have logged it, none of them more than `_HELD` rows ahead.
    """

    __slots__ = ("_settled", "rows")

    def __init__(self) -> None:
        self.rows: dict[int, Points] = {}  # by rank: rows of steps that other ranks may not have logged completely
        self._settled: tuple[Extreme, Extreme] | None = None

    def extend(self, rank: int, steps: array[float], values: array[float]) -> None:
        """Take in values of a rank in the order of the log."""
        if rank not in self.rows:
            self.rows[rank], self._settled = Points(array("d"), array("d")), None  # it was of fewer ranks
        own = self.rows[rank]
        own.x.extend(steps)
        own.y.extend(values)
        if len(own.x) > (_SETTLED if len(self.rows) > 1 else _HELD):
            self._settle()

    def found(self) -> tuple[tuple[Extreme, Extreme] | None, Extreme | None]:
        """The least and the greatest, the first of equal ones, and the newest, which may be NaN.

        None for the extremes if no step has a finite value, and for the newest if the ranks have no common step.
        """
        steps, rows, _ = self._common()
        newest = Extreme(float(steps[-1]), float(rows[:, -1].mean())) if len(steps) else None
        return _wider(self._settled, steps, mean(rows)), newest

    def _settle(self) -> None:
        steps, rows, last = self._common()
        self._settled = _wider(self._settled, steps[:-1], mean(rows[:, :-1]))
        for own, at in zip(self.rows.values(), last, strict=True):
            done = max(int(_begins(own.x)[at]), len(own.x) - _HELD)
            del own.x[:done], own.y[:done]

    def _common(self) -> tuple[Floats, Floats, list[int]]:
        """The steps that all ranks have logged, each rank's values there, and the last one's index in each rank."""
        lines = [_one_per_step(*own) for own in self.rows.values()]
        steps = [np.asarray(line.x) for line in lines]
        count = min(map(len, steps))
        at: list[Any] = [slice(count)] * len(steps)
        last = [count - 1] * len(steps)
        if any((one[:count] != steps[0][:count]).any() for one in steps):  # some ranks log at fewer steps
            common = reduce(np.intersect1d, steps)
            for rank, one in enumerate(steps):
                values, firsts = np.unique(one, return_index=True)
                at[rank] = firsts[np.searchsorted(values, common)]
                last[rank] = int(at[rank][-1]) if len(common) else 0
        rows = np.stack([np.asarray(line.y)[one] for line, one in zip(lines, at, strict=True)])
        return np.array(steps[0][at[0]]), rows, last  # a copy: an array with a view cannot grow


def _wider(known: tuple[Extreme, Extreme] | None, steps: Floats, means: Floats) -> tuple[Extreme, Extreme] | None:
    """The least and the greatest of these means and of those ``known`` before."""
    finite = np.isfinite(means)
    if not finite.any():
        return known
    steps, means = steps[finite], means[finite]
    least, most = (Extreme(float(steps[at]), float(means[at])) for at in (means.argmin(), means.argmax()))
    if known is None:
        return least, most
    return min(known[0], least, key=attrgetter("value")), max(known[1], most, key=attrgetter("value"))


def mean(rows: Floats) -> Floats:
    """The mean of the rows that have a number there; NaN if none has."""
    known = np.isfinite(rows)
    count = known.sum(axis=0)
    total = np.where(known, rows, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _means(values: Sequence[float], stride: int) -> list[float]:
    if stride == 1:
        return list(values)
    means: list[float] = np.asarray(values).reshape(-1, stride).mean(axis=1).tolist()
    return means


def _begins(x: array[float]) -> npt.NDArray[np.intp]:
    """The first value of each step."""
    steps = np.asarray(x)
    return np.flatnonzero(np.concatenate(((True,), steps[1:] != steps[:-1])))


def _one_per_step(x: array[float], y: array[float]) -> Points:
    steps = np.asarray(x)
    if (steps[1:] != steps[:-1]).all():  # as of most runs
        return Points(x, y)
    begins = _begins(x)
    means = np.add.reduceat(y, begins) / np.diff(begins, append=len(x))
    return Points(array("d", steps[begins]), array("d", means))


def _halved(values: array[float]) -> array[float]:
    return array("d", ((a + b) / 2 for a, b in zip(values[::2], values[1::2], strict=True)))


class Rate:
    """Amount per second of one rank: now, over all, and as a curve over time in seconds since ``origin``.

    An amount at time t was done before t, so the first one only starts the clock. Each ``interval`` seconds make one
    value of the curve; the current rate covers the last ``window`` seconds.
    """

    def __init__(self, origin: float, interval: float = 0.5, window: float = 3.0) -> None:
        self._origin = origin
        self._interval = interval
        self._window = window
        self._series = Series()
        self._marks: deque[tuple[float, float]] = deque()  # (time, total) an interval apart, over the window
        self._first = self._last = (0.0, 0.0)
        self.total = 0.0

    def extend(self, times: Sequence[float], amounts: Sequence[float]) -> None:
        """Take in amounts in order; ``times`` are seconds on the clock of ``origin``."""
        totals = list(accumulate(amounts, initial=self.total))[1:]
        if not totals:
            return
        start = 0
        if not self._marks:
            self._first = (times[0], totals[0])
            self._marks.append(self._first)
            start = 1
        while (place := bisect_left(times, self._marks[-1][0] + self._interval, start)) < len(totals):
            mark = (times[place], totals[place])
            middle = (self._marks[-1][0] + mark[0]) / 2 - self._origin
            self._series.extend((middle,), (_slope(self._marks[-1], mark),))
            self._marks.append(mark)
            while self._marks[1][0] <= mark[0] - self._window:
                self._marks.popleft()
            start = place + 1
        self._last, self.total = (times[-1], totals[-1]), totals[-1]

    def current(self) -> float:
        """Amount per second over the last window; 0 before the second value."""
        return _slope(self._marks[0], self._last) if self._marks else 0.0

    def mean(self) -> float:
        """Amount per second from the first value to the last."""
        return _slope(self._first, self._last)

    def points(self) -> Points:
        """A copy of the curve."""
        return self._series.points()


def _slope(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0]) if other[0] > one[0] else 0.0
