"""The log of a run that this kernel did not start: followed on disk, or taken over from the ranks' own files."""

from __future__ import annotations

import struct
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from ring_notebook.notebook.record.run_files import RUN, SUMMARY
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.record.run_reader import RunReader
from ring_notebook.notebook.record.run_record import UNREADABLE, RunRecord, RunStatus, read_about, read_summary

__all__ = ["FollowedLog", "TakenOverLog", "logs_in_progress", "runs_in_progress"]

_PERIOD = 0.1
# The notebook that writes the run has this long to write its summary after the last rank has ended.
_SECONDS_TO_SUMMARY = 2.0
_LENGTH = struct.Struct("<I")


def runs_in_progress(runs: Path, cluster: str) -> list[Path]:
    """The folders of the runs in progress in the cluster of this name, oldest first; unreadable runs are skipped."""
    found = []
    for directory in sorted(file.parent for file in runs.glob(f"*/{RUN}") if not (file.parent / SUMMARY).exists()):
        with suppress(*UNREADABLE):
            if read_about(directory)["environment"].get("cluster") == cluster:
                found.append(directory)
    return found


def logs_in_progress(runs: Path, directory: Path, foreign: bool) -> list[FollowedLog | TakenOverLog]:
    """The logs of the runs in progress in the cluster of ``directory``; ``foreign``: a living notebook writes them."""
    spool = directory / "spool"
    found = runs_in_progress(runs, directory.name)
    return [FollowedLog(run) if foreign else TakenOverLog(run, spool) for run in found]


class FollowedLog(RunRecord):
    """A run that a living notebook writes: what it has written so far, and each new record."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, read_about(directory))
        self._reader = RunReader(directory, self.run)
        self._stop = Event()
        self._read()
        self._thread = Thread(target=self._follow, name=f"ring-follow-{self.run}", daemon=True)
        self._thread.start()

    def finish(self, status: RunStatus, error: str = "") -> dict[str, Any]:
        """Stop following. The summary is the writer's; without one it is made from what was read."""
        deadline = time.monotonic() + _SECONDS_TO_SUMMARY
        while not (self.directory / SUMMARY).exists() and time.monotonic() < deadline:
            time.sleep(_PERIOD)
        self.close()
        with suppress(ValueError):  # truncated, as the writer's disk may be full
            self.summary = read_summary(self.directory)
        self.summary = self.summary or {
            "status": status,
            "error": error,
            "seconds": time.time() - self.started,
        }
        return self.summary

    def close(self) -> None:
        """Stop following."""
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._stop.wait(_PERIOD):
            self._read()

    def _read(self) -> None:
        for record, now in self._reader.records():
            with self._changed:
                self._state.apply(record, now)
                self._changed.notify_all()


class TakenOverLog(RunLog):
    """A run whose notebook is gone, written again from the start from the messages that its ranks keep in ``spool``."""

    def __init__(self, directory: Path, spool: Path) -> None:
        super().__init__(directory, **read_about(directory))
        self._spool = spool
        self._seen: dict[Path, int] = {}
        self._stop = Event()
        self._thread = Thread(target=self._follow, name=f"ring-spool-{self.run}", daemon=True)
        self._thread.start()

    def _close(self) -> Path | None:
        """Take in what the ranks have written last, and close as any log does."""
        self._stop.set()
        self._thread.join()
        return super()._close()

    def _now(self) -> float:
        """When the last rank wrote its last record, once all have ended: no kernel may have been there at that time."""
        if len(self.ended()) < self.size:
            return super()._now()
        written = []
        for file in self._spool.glob(f"{self.run}.*"):
            with suppress(FileNotFoundError):  # another kernel has ended the cluster
                written.append(file.stat().st_mtime)
        return max(written, default=super()._now())

    def _follow(self) -> None:
        while True:
            last = self._stop.is_set()
            for file in sorted(self._spool.glob(f"{self.run}.*")):
                self._take(file)
            if last:
                return
            self._stop.wait(_PERIOD)

    def _take(self, file: Path) -> None:
        try:
            source = file.open("rb")
        except FileNotFoundError:  # another kernel has ended the cluster
            return
        with source:
            source.seek(self._seen.get(file, 0))
            data = source.read()
        position = 0
        while position + _LENGTH.size <= len(data):
            (length,) = _LENGTH.unpack_from(data, position)
            if position + _LENGTH.size + length > len(data):
                break
            self.put(data[position + _LENGTH.size : position + _LENGTH.size + length])
            position += _LENGTH.size + length
        self._seen[file] = self._seen.get(file, 0) + position
