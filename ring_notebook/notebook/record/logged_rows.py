"""The rows that a run logged: one type whether pandas is installed or not."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, overload

import numpy as np

from ring_notebook.protocol.records import MetricBatch
from ring_notebook.text.words import first_names, plural, ranks

_OWN_COLUMNS = ("rank", "time", "step")


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One `ring.log` of one rank: ``time`` in seconds since the epoch, ``step``, and the logged ``values`` by name."""

    rank: int
    time: float
    step: int
    values: dict[str, float]


class Metrics(Sequence[MetricRow]):
    """The rows that the ranks logged, in the order in which the notebook received them.

    A sequence of `MetricRow`; `to_pandas` gives all rows as a DataFrame.
    """

    def __init__(self, batches: Iterable[MetricBatch]) -> None:
        self._batches = [batch for batch in batches if batch.values]
        self._ends = list(accumulate(len(batch.values) // batch.width for batch in self._batches))

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics, in the order of their first row."""
        return tuple(dict.fromkeys(name for batch in self._batches for name in batch.names))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> MetricRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[MetricRow]: ...
    def __getitem__(self, index: int | slice) -> MetricRow | list[MetricRow]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        which = bisect_right(self._ends, place)
        batch = self._batches[which]
        start = len(batch.values) - (self._ends[which] - place) * batch.width
        return _row(batch, batch.values[start : start + batch.width])

    def __iter__(self) -> Iterator[MetricRow]:
        return (_row(batch, row) for batch in self._batches for row in batch.rows())

    def to_pandas(self) -> Any:
        """A pandas DataFrame with the columns rank, time, step and one for each metric; a missing value is NaN.

        ``time`` is a timestamp in UTC, where rows have seconds since the epoch. The column of a metric that is itself
        called rank, time or step is ``metric.rank`` and so on. Raises ImportError if pandas is not installed.
        """
        import pandas

        size = len(self)
        rank, time, step = np.empty(size, int), np.empty(size), np.empty(size, int)
        values = {name: np.full(size, np.nan) for name in self.names}
        start = 0
        for batch, end in zip(self._batches, self._ends, strict=True):
            rows = np.frombuffer(batch.values).reshape(-1, batch.width)
            rank[start:end], time[start:end], step[start:end] = batch.rank, rows[:, 0], rows[:, 1]
            for index, name in enumerate(batch.names):
                values[name][start:end] = rows[:, index + 2]
            start = end
        columns = {f"metric.{name}" if name in _OWN_COLUMNS else name: column for name, column in values.items()}
        return pandas.DataFrame(
            {"rank": rank, "time": pandas.to_datetime(time, unit="s", utc=True), "step": step, **columns}
        )

    def __repr__(self) -> str:
        if not self:
            return "<Metrics: no rows>"
        who = {batch.rank for batch in self._batches}
        return f"<Metrics: {plural(len(self), 'row')} of {ranks(who)}: {first_names(self.names)}>"


def _row(batch: MetricBatch, numbers: Sequence[float]) -> MetricRow:
    return MetricRow(batch.rank, numbers[0], int(numbers[1]), dict(zip(batch.names, numbers[2:], strict=True)))
