"""Reads the files of a run: what is new in them since the last time, as records."""

from __future__ import annotations

import json
import math
from array import array
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ring_notebook.field_types import check_fields
from ring_notebook.files.private_files import open_regular
from ring_notebook.notebook.record.run_files import EVENTS, LOADS, METRICS, OUTPUT
from ring_notebook.records import Cleared, Display, Ended, Failure, Load, MetricBatch, Output, Params, Record

__all__ = ["RunReader"]

T = TypeVar("T")


class RunReader:
    """Reads the files of one run. `records` continues where its last call stopped; the other methods read everything.

    A line that is no record of a run is skipped and counted in ``skipped``.
    """

    def __init__(self, directory: Path, run: str) -> None:
        self.skipped = 0
        self._directory = directory
        self._run = run
        self._seen: dict[str, int] = {}  # bytes of each file

    def records(self) -> Iterator[tuple[Record, float]]:
        """The records since the last call with the time of each, those of metrics first."""
        for batch in self._read(METRICS, self._metrics):
            yield batch, batch.values[-batch.width]
        for load in self._read(LOADS, self._load):
            yield load, load.time
        yield from self._read(OUTPUT, self._output)
        yield from self._read(EVENTS, self._event)

    def metrics(self) -> Iterator[MetricBatch]:
        """Every row that was logged, in the order in which the notebook received them."""
        return self._read(METRICS, self._metrics, {})

    def loads(self) -> Iterator[Load]:
        """Every reading of the ranks' machines."""
        return self._read(LOADS, self._load, {})

    def displays(self) -> Iterator[Display]:
        """Everything that the ranks have displayed, in the order in which the notebook received it."""
        return (one for one, _ in self._read(OUTPUT, self._output, {}) if isinstance(one, Display))

    def output(self) -> Iterator[Output]:
        """Everything that the ranks have printed, in the order in which the notebook received it."""
        return (one for one, _ in self._read(OUTPUT, self._output, {}) if isinstance(one, Output))

    def _read(self, name: str, parse: Callable[[Any], T], seen: dict[str, int] | None = None) -> Iterator[T]:
        seen = self._seen if seen is None else seen
        try:
            file = open_regular(self._directory / name)
        except FileNotFoundError:
            return
        with file:
            file.seek(seen.get(name, 0))
            for line in file:
                if not line.endswith(b"\n"):  # the writer is in the middle of it
                    return
                seen[name] = seen.get(name, 0) + len(line)
                try:
                    one = parse(json.loads(line))
                except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
                    self.skipped += 1
                    continue
                yield one

    def _metrics(self, line: dict[str, Any]) -> MetricBatch:
        if isinstance(line.get("rows"), str):
            batch = MetricBatch(self._run, line["rank"], tuple(line["names"]), array("d", b64decode(line["rows"])))
        else:  # of an older version: one row, its metrics beside the record's own fields
            rank, time, step = line.pop("rank"), line.pop("time"), line.pop("step")
            batch = MetricBatch(self._run, rank, tuple(line), array("d", (time, step, *line.values())))
        if type(batch.rank) is not int or not set(map(type, batch.names)) <= {str}:
            raise ValueError("no rank or no names")
        if not batch.values or len(batch.values) % batch.width:
            raise ValueError("no whole rows")
        if not all(map(math.isfinite, batch.values[1 :: batch.width])):
            raise ValueError("a step that is no number")
        return batch

    def _load(self, line: dict[str, Any]) -> Load:
        return _checked(Load, {"run": self._run, **line})

    def _output(self, line: dict[str, Any]) -> tuple[Output | Display | Cleared, float]:
        time, kind = float(line.pop("time")), line.pop("kind", Output.kind)
        if kind == Output.kind:
            return _checked(Output, {"run": self._run, **line}), time
        return (_checked(Display, line) if kind == Display.kind else _checked(Cleared, line)), time

    def _event(self, line: dict[str, Any]) -> tuple[Failure | Ended | Params, float]:
        time, kind = float(line.pop("time")), line.pop("kind")
        if kind == Failure.kind:
            line["frames"] = tuple(tuple(frame) for frame in line["frames"])
            return _checked(Failure, line), time
        if kind == Params.kind:
            return _checked(Params, line), time
        return _checked(Ended, line), time


def _checked(cls: type[T], fields: dict[str, Any]) -> T:
    check_fields(cls, fields)
    return cls(**fields)
