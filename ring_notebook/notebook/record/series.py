"""Curves in bounded memory: a metric or a throughput becomes fewer points on its way in."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Points", "Rate", "Series"]


class Points(NamedTuple):
    """A curve as two arrays of equal length."""

    x: array[float]
    y: array[float]


class Series:
    """The values of one metric on one rank as at most ``limit`` points.

    Every point is the mean of ``stride`` values that followed one another. When the points run out,
    neighbours are joined and the stride doubles: a long run keeps between ``limit / 2`` and ``limit`` points.
    """

    __slots__ = ("_limit", "_pending", "_stride", "_sum_x", "_sum_y", "_x", "_y")

    def __init__(self, limit: int = 400) -> None:
        if limit < 2 or limit % 2:
            raise ValueError(f"limit={limit}: expected an even number of at least 2")
        self._limit = limit
        self._stride = 1
        self._x: array[float] = array("d")
        self._y: array[float] = array("d")
        self._sum_x = self._sum_y = 0.0
        self._pending = 0

    def extend(self, x: Iterable[float], y: Iterable[float]) -> None:
        """Take in values in the order of the log. A NaN makes its own point NaN: a gap in the curve."""
        sum_x, sum_y, pending, stride = self._sum_x, self._sum_y, self._pending, self._stride
        for one_x, one_y in zip(x, y, strict=True):
            sum_x += one_x
            sum_y += one_y
            pending += 1
            if pending == stride:
                self._x.append(sum_x / stride)
                self._y.append(sum_y / stride)
                sum_x = sum_y = 0.0
                pending = 0
                if len(self._x) == self._limit:
                    self._x, self._y = _halved(self._x), _halved(self._y)
                    stride *= 2
        self._sum_x, self._sum_y, self._pending, self._stride = sum_x, sum_y, pending, stride

    def points(self) -> Points:
        """A copy of the curve up to the newest value."""
        x, y = self._x[:], self._y[:]
        if self._pending:
            x.append(self._sum_x / self._pending)
            y.append(self._sum_y / self._pending)
        return Points(x, y)


def _halved(values: array[float]) -> array[float]:
    return array("d", ((a + b) / 2 for a, b in zip(values[::2], values[1::2], strict=True)))


class Rate:
    """Amount per second of one rank: now, over all, and as a curve over time in seconds since ``origin``.

    The amount that comes with time t was done before t, so the first one only starts the clock. ``interval`` seconds
    of it make one value of the curve; the current rate covers the last ``window`` seconds.
    """

    def __init__(self, origin: float, interval: float = 0.5, window: float = 3.0) -> None:
        self._origin = origin
        self._interval = interval
        self._window = window
        self._series = Series()
        self._marks: deque[tuple[float, float]] = deque()  # (time, total) an interval apart, over the window
        self._first = self._last = (0.0, 0.0)
        self.total = 0.0

    def extend(self, times: Iterable[float], amounts: Iterable[float]) -> None:
        """Take in amounts in order; ``times`` are seconds on the clock of ``origin``."""
        for time, amount in zip(times, amounts, strict=True):
            self.total += amount
            self._last = (time, self.total)
            if not self._marks:
                self._first = self._last
                self._marks.append(self._last)
            elif time - self._marks[-1][0] >= self._interval:
                middle = (self._marks[-1][0] + time) / 2 - self._origin
                self._series.extend((middle,), (_slope(self._marks[-1], self._last),))
                self._marks.append(self._last)
                while self._marks[1][0] <= time - self._window:
                    self._marks.popleft()

    def current(self) -> float:
        """Amount per second over the last window; 0 until two values have come."""
        return _slope(self._marks[0], self._last) if self._marks else 0.0

    def mean(self) -> float:
        """Amount per second from the first value to the last."""
        return _slope(self._first, self._last)

    def points(self) -> Points:
        """A copy of the curve."""
        return self._series.points()


def _slope(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0]) if other[0] > one[0] else 0.0
