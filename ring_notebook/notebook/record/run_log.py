"""The log of one run: as the ranks' messages come in (`RunLog`), and read back from disk (`RunRecord`)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any

from ring_notebook.notebook.record.displays import Displayed, bundles
from ring_notebook.notebook.record.run_files import (
    RUN,
    SUMMARY,
    RunFiles,
    read_displays,
    read_json,
    read_metrics,
    read_records,
    write_json,
)
from ring_notebook.notebook.record.run_view import RunState, RunView
from ring_notebook.records import Ended, Failure, Status, decode

__all__ = ["RunLog", "RunRecord"]


class RunRecord:
    """What is known of one run. `load` reads a run that has ended; a `RunLog` is one that goes on.

    ``options`` are those of the cell's magic, ``environment`` is what it ran on, ``started`` is in seconds
    since the epoch. ``summary`` is empty until the run has ended.
    """

    def __init__(self, directory: Path, about: dict[str, Any]) -> None:
        self.directory = directory
        self.run: str = about["run"]
        self.name: str = about["name"]
        self.size: int = about["size"]
        self.source: str = about["source"]
        self.options: dict[str, Any] = about["options"]
        self.environment: dict[str, Any] = about["environment"]
        self.started: float = about["started"]
        self.summary: dict[str, Any] = read_json(directory / SUMMARY)
        self._state = RunState(self.size, self.started)
        self._changed = Condition()
        self.trouble = ""  # why records could not be read or written, for the panel to show

    @classmethod
    def load(cls, directory: Path) -> RunRecord:
        """The run whose files are in ``directory``. Raises FileNotFoundError when there is none."""
        about = read_json(directory / RUN)
        if not about:
            raise FileNotFoundError(f"no run in {directory}: {RUN} is not there")
        record = RunRecord(directory, about)
        for one, now in read_records(directory, record.run):
            record._state.apply(one, now)
        return record

    @property
    def status(self) -> str:
        """``running`` until the run has ended, then ``ok``, ``failed`` or ``interrupted``."""
        return str(self.summary.get("status", "running"))

    def view(self) -> RunView:
        """The run at this moment (after its end: at its end), bounded however long it is."""
        now = self.started + self.summary["seconds"] if self.summary else self._now()
        with self._changed:
            return self._state.view(now)

    def _now(self) -> float:
        """The moment that a run without a summary is seen at, in seconds since the epoch."""
        return time.time()

    def metrics(self) -> Any:
        """Every logged row from disk: a pandas DataFrame where pandas is installed, else a list of dicts.

        Columns are rank, time (seconds since the epoch), step and the names that were logged.
        """
        rows = read_metrics(self.directory)
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame.from_records(rows)

    def displays(self) -> list[Displayed]:
        """Everything that the ranks have displayed, from disk, in the order in which it came."""
        return bundles(read_displays(self.directory))

    def failures(self) -> list[Failure]:
        """The exceptions that ended ranks, in the order in which they came."""
        with self._changed:
            return list(self._state.failures)

    def ended(self) -> dict[int, Ended]:
        """How the ranks that have ended did so."""
        with self._changed:
            return self._state.ended()

    def statuses(self) -> dict[int, Status]:
        """The newest status of every rank that has sent one."""
        with self._changed:
            return self._state.statuses()

    def wait_ended(self, ranks: Iterable[int], timeout: float) -> bool:
        """Wait until ``ranks`` have ended; False when they have not after ``timeout`` seconds."""
        wanted = set(ranks)
        with self._changed:
            return self._changed.wait_for(lambda: wanted <= self._state.ended().keys(), timeout)


class RunLog(RunRecord):
    """The log of a run that goes on.

    `put` only enqueues. One thread decodes, appends to the files in ``directory`` and keeps a downsampled
    state that `view` copies. The files hold every record; memory does not grow with the length of the run.
    """

    def __init__(
        self,
        directory: Path,
        run: str,
        name: str,
        size: int,
        source: str,
        options: dict[str, Any],
        environment: dict[str, Any],
        started: float | None = None,
    ) -> None:
        about = {
            "run": run,
            "name": name,
            "size": size,
            "source": source,
            "options": options,
            "environment": environment,
            "started": time.time() if started is None else started,
        }
        self._files = RunFiles(directory)
        write_json(directory / RUN, about)
        super().__init__(directory, about)
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._writer = Thread(target=self._write, name=f"ring-log-{run}", daemon=True)
        self._writer.start()

    def put(self, message: bytes) -> None:
        """Take in one message of a rank (`records.encode`) from any thread. Never waits."""
        self._queue.put(message)

    def finish(self, status: str, error: str = "") -> dict[str, Any]:
        """Write what is still queued and the summary, close the files. Messages after that are lost."""
        self.close()
        view = self.view()
        self.summary = {
            "run": self.run,
            "name": self.name,
            "status": status,
            "error": error,
            "size": self.size,
            "started": self.started,
            "seconds": round(view.elapsed, 3),
            "samples": sum(rank.samples for rank in view.ranks),
            "samples_per_s": view.samples_per_s,
            "ranks": [
                {
                    "rank": rank.rank,
                    "status": rank.ended.status if rank.ended else "lost",
                    "step": rank.step,
                    "samples_per_s": rank.samples_per_s,
                    "last": dict(rank.last),
                    **(rank.ended.summary if rank.ended else {}),
                }
                for rank in view.ranks
            ],
        }
        write_json(self.directory / SUMMARY, self.summary)
        return self.summary

    def close(self) -> None:
        """Write what is still queued and close the files, of a run that goes on without this log."""
        self._queue.put(None)
        self._writer.join()

    def _write(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._take_in(message)
                if self._queue.empty():
                    self._files.flush()
            except (OSError, ValueError) as error:
                self.trouble = f"records are missing in {self.directory}: {error}"
        self._files.close()

    def _take_in(self, message: bytes) -> None:
        now = time.time()
        for record in decode(message):
            self._files.write(record, now)
            with self._changed:
                self._state.apply(record, now)
                self._changed.notify_all()
