"""Writes the files of a run: records become lines of JSON, also when the disk fills up in the middle of the run."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from base64 import b64encode
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ring_notebook.files.private_files import make_private_folder, open_private, open_regular
from ring_notebook.notebook.record.appender import Appender
from ring_notebook.records import Cleared, Display, Load, MetricBatch, Output, Record, Status, Trace

__all__ = [
    "EVENTS",
    "LOADS",
    "METRICS",
    "OUTPUT",
    "OUTPUT_TEXT",
    "RUN",
    "SUMMARY",
    "TIMELINE",
    "RunFiles",
    "read_json",
    "read_text",
    "write_json",
]

RUN = "run.json"  # source, options, environment, size, start
METRICS = "metrics.jsonl"  # a line per batch of rows of one rank, their numbers as float64 in base64
OUTPUT = "output.jsonl"  # a line per piece of output (time, rank, stream, text) or per display
OUTPUT_TEXT = "output.txt"  # what was printed as text, once a user has asked for it
EVENTS = "events.jsonl"  # a line per failure and per rank that ended
LOADS = "loads.jsonl"  # a line per reading of a rank's machine
SUMMARY = "summary.json"  # how the run ended
TIMELINE = "timeline.json"  # of a run with --timeline: what all ranks did, in Chrome's trace format

_MOST_KEPT = 16 << 20  # bytes per file that wait in memory while the disk is full
_WRITE_AT = 1 << 20  # bytes, so that a backlog is not held twice
_SUMMARY_BYTES, _SUMMARY_BYTES_PER_RANK = 16_384, 512


class RunFiles:
    """Appends records to the files of one run. One thread writes.

    A disk that takes nothing stops no run: records then wait in memory (`Appender`), and ``trouble`` says so.
    Raises OSError when the files cannot be created, or there is no room for the summary of ``ranks`` ranks.
    """

    def __init__(self, directory: Path, ranks: int) -> None:
        make_private_folder(directory)
        self._directory = directory
        self.trouble = ""
        self._reserve = directory / "summary.reserved"
        _reserve(self._reserve, _SUMMARY_BYTES + ranks * _SUMMARY_BYTES_PER_RANK)
        self._files = {name: Appender(directory / name, _MOST_KEPT) for name in (METRICS, OUTPUT, EVENTS, LOADS)}
        self._traces: Appender | None = None

    @property
    def lost(self) -> int:
        """Records that are neither on disk nor in memory: the oldest of those that the disk did not take."""
        return sum(file.lost for file in self._files.values())

    def write(self, record: Record, now: float) -> None:
        """Append one record. The newest statuses go into the summary; they have no file."""
        if isinstance(record, MetricBatch):
            self._add(METRICS, metric_line(record))
        elif isinstance(record, Output):
            self._add(OUTPUT, {"time": now, "rank": record.rank, "stream": record.stream, "text": record.text})
        elif isinstance(record, Display | Cleared):
            self._add(OUTPUT, {"time": now, "kind": record.kind, **asdict(record)})
        elif isinstance(record, Load):
            self._add(LOADS, {"time": record.time, "rank": record.rank, "values": record.values})
        elif isinstance(record, Trace):
            self._append_trace(record.events)
        elif not isinstance(record, Status):
            self._add(EVENTS, {"time": now, "kind": record.kind, **asdict(record)})

    def _add(self, name: str, line: dict[str, Any]) -> None:
        file = self._files[name]
        file.add(json.dumps(line).encode() + b"\n")
        if file.kept_bytes > _WRITE_AT + (_MOST_KEPT if self.trouble else 0):
            self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system, as far as the disk takes it; ``trouble`` says when it does not."""
        trouble = ""
        for file in filter(None, [*self._files.values(), self._traces]):
            try:
                file.flush()
            except OSError as error:
                trouble = f"{error.strerror} in {self._directory}"
        self.trouble = trouble

    def close(self) -> Path | None:
        """Write everything and close the files.

        Records that the disk still does not take go to a temporary folder, which is returned; its files have the same
        names. ``trouble`` stays set when there is no room for them either, and they are lost.
        """
        if self._traces is not None:
            self._traces.add(b"]}")
        self.flush()
        rest = self._write_elsewhere() if self.trouble else None
        for file in self._files.values():
            file.close()
        if self._traces is not None:
            self._traces.close()
            self._timeline(".partial").replace(self._timeline())
        return rest

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write how the run ended into the room that was reserved for it; what does not fit is left out."""
        shorter = {
            **summary,
            "error": summary["error"][:4096],
            "ranks": [_without_values(one) for one in summary["ranks"]],
        }
        for content in (summary, shorter):
            data = (json.dumps(content, indent=1, default=str) + "\n").encode()
            try:
                with self._reserve.open("r+b") as file:
                    file.write(data)
                    file.truncate(len(data))
                self._reserve.replace(self._directory / SUMMARY)
                return
            except OSError as error:
                self.trouble = f"{error.strerror} in {self._directory}"

    def _write_elsewhere(self) -> Path | None:
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"ring-{self._directory.name}-"))
            for file in self._files.values():
                (folder / file.name).write_bytes(file.take_kept())
        except OSError:
            return None
        return folder

    def _append_trace(self, events: bytes) -> None:
        """Join the array of one rank's events to those of the others, unread."""
        if self._traces is None:
            self._traces = Appender(self._timeline(".partial"), sys.maxsize)  # each rank sends one, bounded by the core
            self._traces.add(b'{"displayTimeUnit": "ms", "traceEvents": [')
        else:
            self._traces.add(b",\n")
        self._traces.add(events.strip()[1:-1])

    def _timeline(self, suffix: str = ".json") -> Path:
        return (self._directory / TIMELINE).with_suffix(suffix)


def _reserve(path: Path, nbytes: int) -> None:
    """Take the room that a summary needs, so that a full disk cannot keep it from being written."""
    with open_private(path, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            # The file system reserves nothing.


def _without_values(rank: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rank.items() if name != "last"}


def metric_line(batch: MetricBatch) -> dict[str, Any]:
    """A batch as the object of its line.

    Numbers are in base64 because repr and parsing of a float take thirty times as long, and a writer that falls behind
    a fast cell holds its records in memory. ``names`` stand apart from the record's own fields: a metric may be called
    rank.
    """
    return {"rank": batch.rank, "names": batch.names, "rows": b64encode(batch.values.tobytes()).decode()}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace ``path`` as a whole, so that a reader never sees half of it."""
    partial = path.with_suffix(".partial")
    with open_private(partial, "w") as file:
        file.write(json.dumps(content, indent=1, default=str) + "\n")
    partial.replace(path)


def read_text(path: Path) -> str:
    """The content of ``path``; empty when it is not there.

    Another kernel that ends the cluster may remove its files at any moment. Raises as `open_regular`.
    """
    try:
        with open_regular(path) as file:
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; empty when the file is not there. Raises ValueError when it holds something else."""
    try:
        content = json.loads(read_text(path) or "{}")
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is truncated or no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content
