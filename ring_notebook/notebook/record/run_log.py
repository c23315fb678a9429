"""The log of a run in progress: takes in the messages of its ranks, writes them to disk, keeps a bounded state."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from ring_notebook.files.run_folders import RUN
from ring_notebook.notebook.record.run_files import RunFiles, write_json
from ring_notebook.notebook.record.run_record import RunRecord, RunStatus
from ring_notebook.notebook.record.run_view import RunView
from ring_notebook.protocol.records import Trace, decode, encode

_SECONDS_TO_RETRY = 0.5  # a full disk
_CURVE = 24  # values of the main metric in the summary: as many as a list has room for


class RunLog(RunRecord):
    """The log of a run in progress.

    `put` only enqueues. One thread decodes, keeps a downsampled state that `view` copies, and appends to the journal in
    ``directory``. The journal holds every record; memory does not grow with the length of the run.
    Where ``directory`` cannot be written, the run is recorded in a temporary folder, and ``trouble`` says so.
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
        elsewhere = ""
        try:
            self._files = _create(directory, about)
        except OSError as error:
            wanted, directory = directory, Path(tempfile.mkdtemp(prefix="ring-")) / run
            elsewhere = f"{error.strerror} in {wanted.parent}: this run is recorded in {directory}"
            self._files = _create(directory, about)
        super().__init__(directory, about)
        self._elsewhere = self.trouble = elsewhere
        self._unreadable = ""
        self._queue: SimpleQueue[tuple[bytes, float | None] | None] = SimpleQueue()
        self._writer = Thread(target=self._write, name=f"ring-log-{run}", daemon=True)
        self._writer.start()

    def put(self, message: bytes, now: float | None = None) -> None:
        """Take in one message of a rank (`records.encode`) from any thread. Never waits.

        ``now`` is the time that a journal has for it, in seconds since the epoch.
        """
        self.received += 1
        self._queue.put((message, now))

    def finish(self, status: RunStatus, error: str = "", shown: str = "") -> dict[str, Any]:
        """Write what is still queued and the summary, close the files. Messages after that are lost.

        ``error`` says in one line why the run has failed, ``shown`` as its cell shows it.
        """
        rest = self._close()
        view = self.view()
        self.summary = {
            "run": self.run,
            "name": self.name,
            "status": status,
            "error": error,
            "shown": shown,
            "size": self.size,
            "started": self.started,
            "seconds": round(view.elapsed, 3),
            "samples": sum(rank.samples for rank in view.ranks),
            "samples_per_s": view.samples_per_s,
            **({"energy": asdict(energy)} if (energy := view.energy).joules is not None else {}),
            **({"trouble": self.trouble} if self.trouble else {}),
            **({"rest": str(rest)} if rest else {}),
            "params": self.params,
            "curve": _main_curve(view, self.options.get("plot", ())),
            "last": dict(view.last),
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
        self._files.write_summary(self.summary)
        return self.summary

    def close(self) -> None:
        """Write what is still queued and close the files, of a run that continues without this log."""
        self._close()

    def _close(self) -> Path | None:
        """Close; returns the folder of the records that the disk did not take."""
        self._queue.put(None)
        self._writer.join()
        rest = self._files.close()
        if rest:
            self.trouble = f"{self._files.trouble}: the newest records are in {rest}{self._lost()}"
        elif self._files.trouble:
            self.trouble = f"{self._files.trouble}: the newest records are lost"
        else:
            self.trouble = f"records were lost: {self._files.lost}" if self._files.lost else self._other_trouble()
        return rest

    def _write(self) -> None:
        while (one := self._next()) is not None:
            message, now = one
            if message:
                try:
                    self._take_in(message, self.now() if now is None else now)
                except Exception as error:  # the next message may be readable
                    self._unreadable = f"a message of a rank could not be read: {type(error).__name__}: {error}"
                self.taken += 1
            if self._queue.empty():
                self._files.flush()
            self._tell()

    def _next(self) -> tuple[bytes, float | None] | None:
        """The next message; an empty one when it is time to see whether a full disk has room again."""
        try:
            return self._queue.get(timeout=_SECONDS_TO_RETRY if self._files.trouble else None)
        except Empty:
            return b"", None

    def _tell(self) -> None:
        if self._files.trouble:
            self.trouble = (
                f"{self._files.trouble}: the run continues, and its newest records stay in memory until there is "
                f"room{self._lost()}"
            )
        else:
            self.trouble = self._other_trouble()

    def _other_trouble(self) -> str:
        return self._unreadable or self._elsewhere

    def _lost(self) -> str:
        return f"; {self._files.lost} older ones are lost" if self._files.lost else ""

    def _take_in(self, message: bytes, now: float) -> None:
        records = decode(message)
        for record in records:
            self._apply(record, now)
        if traces := [record for record in records if isinstance(record, Trace)]:  # they have a file of their own
            for trace in traces:
                self._files.add_trace(trace.events)
            message = encode([record for record in records if not isinstance(record, Trace)])
        self._files.add(message, now)


def _main_curve(view: RunView, plotted: Sequence[str]) -> dict[str, Any]:
    """A few values of the metric that was asked for first, else of the loss, else of the first: means over ranks."""
    wanted = [*(one for name in plotted for one in (name, *name.split("+"))), "loss", *view.charted]
    name = next((name for name in wanted if name in view.curves), "")
    lines = [points.y for points in view.curves.get(name, {}).values() if len(points.y)]
    if not lines:
        return {}
    count = min(_CURVE, max(map(len, lines)))
    columns = [[line[index * len(line) // count] for line in lines] for index in range(count)]
    return {"metric": name, "values": [float(f"{sum(column) / len(column):.4g}") for column in columns]}


def _create(directory: Path, about: dict[str, Any]) -> RunFiles:
    files = RunFiles(directory, about["size"])
    write_json(directory / RUN, about)
    return files
