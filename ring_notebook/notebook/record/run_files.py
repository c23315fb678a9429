"""The files of a run on disk: how records become lines of JSON, and lines records again."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from ring_notebook.private_files import make_private_folder, open_private
from ring_notebook.records import Cleared, Display, Ended, Failure, MetricBatch, Output, Record, Status, Trace

__all__ = [
    "TIMELINE",
    "RunFiles",
    "read_displays",
    "read_json",
    "read_metrics",
    "read_records",
    "read_text",
    "write_json",
]

RUN = "run.json"  # source, options, environment, size, when it started
METRICS = "metrics.jsonl"  # a line per ring.log: rank, time, step and the values
OUTPUT = "output.jsonl"  # a line per piece of output: time, rank, stream, text; or kind and what was displayed
EVENTS = "events.jsonl"  # a line per failure and per rank that ended
SUMMARY = "summary.json"  # what the run came to
TIMELINE = "timeline.json"  # of a recorded run: what all ranks did, in Chrome's trace format


class RunFiles:
    """Appends records to the files of one run. One thread writes."""

    def __init__(self, directory: Path) -> None:
        make_private_folder(directory)
        self._timeline = directory / TIMELINE
        self._traces: IO[bytes] | None = None
        self._files: dict[str, IO[str]] = {
            name: open_private(directory / name, "w") for name in (METRICS, OUTPUT, EVENTS)
        }

    def write(self, record: Record, now: float) -> None:
        """Append one record. The newest statuses go into the summary; they have no file."""
        if isinstance(record, MetricBatch):
            self._files[METRICS].write(metric_lines(record))
        elif isinstance(record, Output):
            line = {"time": now, "rank": record.rank, "stream": record.stream, "text": record.text}
            self._files[OUTPUT].write(json.dumps(line) + "\n")
        elif isinstance(record, Display | Cleared):
            self._files[OUTPUT].write(json.dumps({"time": now, "kind": record.kind, **asdict(record)}) + "\n")
        elif isinstance(record, Trace):
            self._append_trace(record.events)
        elif not isinstance(record, Status):
            line = {"time": now, "kind": record.kind, **asdict(record)}
            self._files[EVENTS].write(json.dumps(line) + "\n")

    def flush(self) -> None:
        """Hand everything written to the operating system."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Flush and close the files."""
        for file in self._files.values():
            file.close()
        if self._traces is not None:
            self._traces.write(b"]}")
            self._traces.close()
            self._timeline.with_suffix(".partial").replace(self._timeline)

    def _append_trace(self, events: bytes) -> None:
        """Join the array of one rank's events to those of the others, unread."""
        if self._traces is None:
            self._traces = open_private(self._timeline.with_suffix(".partial"), "wb")
            self._traces.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
        else:
            self._traces.write(b",\n")
        self._traces.write(events.strip()[1:-1])


def metric_lines(batch: MetricBatch) -> str:
    """A line of JSON per row."""
    rows = batch.rows()
    if math.isfinite(sum(batch.values)):
        # One template for all rows: several times faster than an encoder, and repr of a finite float is JSON.
        names = (json.dumps(name).replace("%", "%%") for name in batch.columns[2:])
        pairs = "".join(f", {name}: %r" for name in names)
        line = f'{{"rank": {batch.rank}, "time": %r, "step": %d{pairs}}}\n'
        return "".join([line % row for row in rows])
    columns = ("rank", *batch.columns)
    lines = (dict(zip(columns, (batch.rank, row[0], int(row[1]), *row[2:]), strict=True)) for row in rows)
    return "".join(json.dumps(line) + "\n" for line in lines)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace ``path`` as a whole, so that a reader never sees half of it."""
    partial = path.with_suffix(".partial")
    with open_private(partial, "w") as file:
        file.write(json.dumps(content, indent=1, default=str) + "\n")
    partial.replace(path)


def read_text(path: Path) -> str:
    """The content of ``path``; empty when it is not there.

    Another kernel that ends the cluster removes its files at any moment, so that asking first would not do.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def read_json(path: Path) -> dict[str, Any]:
    """The content of ``path``; empty when the file is not there."""
    content: dict[str, Any] = json.loads(read_text(path) or "{}")
    return content


def _lines(path: Path, seen: dict[str, int] | None = None) -> Iterator[dict[str, Any]]:
    seen = {} if seen is None else seen
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(seen.get(path.name, 0))
        for line in file:
            if line.endswith(b"\n"):  # a run in progress may end in half a line
                seen[path.name] = seen.get(path.name, 0) + len(line)
                yield json.loads(line)


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Every row that was logged, in the order in which it came: rank, time, step, values."""
    return list(_lines(directory / METRICS))


def read_displays(directory: Path) -> list[Display]:
    """Everything that the ranks have displayed, in the order in which it came."""
    lines = (line for line in _lines(directory / OUTPUT) if line.get("kind") == Display.kind)
    return [Display(**{name: value for name, value in line.items() if name not in ("time", "kind")}) for line in lines]


def read_records(directory: Path, run: str, seen: dict[str, int] | None = None) -> Iterator[tuple[Record, float]]:
    """The records of a run with the time of each, metrics first.

    ``seen`` holds how many bytes of each file were read before; the rest is read, and ``seen`` kept up to date.
    """
    for line in _lines(directory / METRICS, seen):
        rank, time = line.pop("rank"), line["time"]
        yield MetricBatch(run, rank, tuple(line), array("d", line.values())), time
    for line in _lines(directory / OUTPUT, seen):
        time, kind = line.pop("time"), line.pop("kind", Output.kind)
        if kind == Output.kind:
            yield Output(run, **line), time
        else:
            yield (Display(**line) if kind == Display.kind else Cleared(**line)), time
    for line in _lines(directory / EVENTS, seen):
        time, kind = line.pop("time"), line.pop("kind")
        if kind == Failure.kind:
            line["frames"] = tuple(tuple(frame) for frame in line["frames"])
            yield Failure(**line), time
        else:
            yield Ended(**line), time
