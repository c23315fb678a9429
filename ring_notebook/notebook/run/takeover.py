"""The log of a run that this kernel did not start, from the journal of its notebook or the journals of its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from ring_notebook.files.run_folders import RUN, SUMMARY, runs_directory
from ring_notebook.notebook.record.run_files import JOURNAL, Journal
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.record.run_record import RunRecord, RunStatus, read_about, read_summary, readable

_PERIOD = 0.1
# The notebook that writes the run has this long to write its summary after the last rank has ended.
_SECONDS_TO_SUMMARY = 2.0


def runs_in_progress(runs: Path, cluster: str) -> list[Path]:
    """The folders of the runs in progress in the cluster of this name, oldest first; unreadable runs are skipped."""
    begun = sorted(file.parent for file in runs.glob(f"*/{RUN}") if not (file.parent / SUMMARY).exists())
    return [directory for directory, about in readable(begun) if about["environment"].get("cluster") == cluster]


def journals_of(directory: Path) -> Path:
    """Where the ranks of the cluster of ``directory`` keep the records of their runs, beside the notebook's own.

    Hosts that share the folder of the notebook share this one too.
    """
    return runs_directory().parent / "kept" / directory.name


def logs_in_progress(runs: Path, directory: Path, foreign: bool) -> list[FollowedLog | TakenOverLog]:
    """The logs of the runs in progress in the cluster of ``directory``; ``foreign``: a living notebook writes them."""
    found = runs_in_progress(runs, directory.name)
    return [FollowedLog(run) if foreign else TakenOverLog(run, journals_of(directory)) for run in found]


class _Follower:
    """Calls ``look`` again and again, in a thread, until `stop`, and once more after that."""

    def __init__(self, look: Callable[[], None], run: str) -> None:
        self._look = look
        self._stop = Event()
        self._thread = Thread(target=self._follow, name=f"ring-follow-{run}", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stop.wait(_PERIOD)
            self._look()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


class FollowedLog(RunRecord):
    """A run that a living notebook writes: the records in its journal, and each new one."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, read_about(directory))
        journal = Journal(directory / JOURNAL)
        self._read(journal)
        self._follower = _Follower(lambda: self._read(journal), self.run)

    def finish(self, status: RunStatus, error: str = "", shown: str = "") -> dict[str, Any]:
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
            "shown": shown,
            "seconds": self.now() - self.started,
        }
        return self.summary

    def close(self) -> None:
        """Stop following."""
        self._follower.stop()


class TakenOverLog(RunLog):
    """A run whose notebook is gone, written again from the start from the journals of its ranks in ``spool``."""

    def __init__(self, directory: Path, spool: Path) -> None:
        super().__init__(directory, **read_about(directory))
        self._spool = spool
        self._rank_journals: dict[Path, Journal] = {}
        self._follower = _Follower(self._look, self.run)

    def _close(self) -> Path | None:
        """Take in what the ranks have written last, and close as any log does."""
        self._follower.stop()
        return super()._close()

    def _look(self) -> None:
        for file in sorted(self._spool.glob(f"{self.run}.*")):
            for line, now in self._rank_journals.setdefault(file, Journal(file)).lines():
                self.put(line, now)
