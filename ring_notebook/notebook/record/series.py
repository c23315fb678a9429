"""Curves in bounded memory: a metric or a throughput is averaged into fewer points as its values arrive."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np


class Points(NamedTuple):
    """A curve as two arrays of equal length, which nobody changes."""

    x: array[float]
    y: array[float]


class Series:
    """The values of one metric on one rank as at most ``limit`` points.

    Every point is the mean of ``stride`` consecutive values. When there are ``limit`` points, neighbours are joined and
    the stride doubles: a long run keeps between ``limit / 2`` and ``limit`` points. With ``every`` these are all drawn,
    else those of one step are one: batches whose gradients are accumulated.
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


def _means(values: Sequence[float], stride: int) -> list[float]:
    if stride == 1:
        return list(values)
    means: list[float] = np.asarray(values).reshape(-1, stride).mean(axis=1).tolist()
    return means


def _one_per_step(x: array[float], y: array[float]) -> Points:
    begins = np.flatnonzero(np.diff(x, prepend=np.nan))
    if len(begins) == len(x):
        return Points(x, y)
    means = np.add.reduceat(y, begins) / np.diff(begins, append=len(x))
    return Points(array("d", np.asarray(x)[begins]), array("d", means))


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
