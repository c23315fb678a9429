"""Notices that engines die, on any host, and finds out why."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread

from ring_notebook.analysis.time_limits import SECONDS_TO_EXPLAIN
from ring_notebook.machine.os_calls import Wake, exit_descriptor
from ring_notebook.machine.process_life import is_alive, is_ending
from ring_notebook.notebook.cluster.death import Death, by_batch_system, explain_rank, failures_of, without_others
from ring_notebook.notebook.engines import Engine
from ring_notebook.notebook.record.run_files import read_text

_SECONDS_TO_END = 5.0  # a process that frees much memory takes long to end
_POLL = 0.005
_LOOK = 0.1  # seconds between reads of the log, for ranks of other hosts


class LostRanks:
    """Watches engines in a thread of its own; ``deaths`` has those that have ended, by rank.

    It watches processes of this host, and for other hosts what the supervisor reports. A report counts once: what
    was in the log before a process was watched belongs to earlier processes of its rank. ``log`` is the file to which
    the engines and their supervisor write, ``logs`` holds the ranks' own logs.
    """

    def __init__(self, log: Path, logs: Path) -> None:
        self._log = log
        self._written = ""
        self._logs = logs
        self._lock = Lock()
        self._deaths: dict[int, Death] = {}
        self._starts: dict[int, int] = {}  # how often a rank was started again
        self._reports: dict[int, int] = {}  # by rank: reports of processes before the present one
        self._watched: dict[int, tuple[int, int]] = {}  # by descriptor of a process: its rank, and which start
        self._elsewhere: dict[int, int] = {}  # by rank of other hosts: which start
        self._read = -1  # size of the log when it was last read for them
        self._wake = Wake()
        self._closed = False
        self._thread = Thread(target=self._watch, name="ring-deaths", daemon=True)
        self._thread.start()

    @property
    def deaths(self) -> dict[int, Death]:
        """The ranks that have died, and why."""
        with self._lock:
            return dict(self._deaths)

    def watch(self, engines: Iterable[Engine]) -> None:
        """Watch these engines too."""
        for engine in engines:
            reports = len(failures_of(self._output(), engine.rank))
            start = self._starts.get(engine.rank, 0)
            if not engine.local:
                with self._lock:
                    self._elsewhere[engine.rank] = start
                    self._reports.setdefault(engine.rank, engine.reports)
                    self._read = -1  # read the log for this rank too
                self._wake.set()
                continue
            try:
                descriptor = exit_descriptor(engine.pid)
            except ProcessLookupError:
                self._explain(engine.rank, start)
                continue
            if not is_alive(engine.pid, engine.began):  # a later process may have the same number
                os.close(descriptor)
                self._explain(engine.rank, start)
                continue
            with self._lock:
                self._watched[descriptor] = engine.rank, start
                self._reports[engine.rank] = reports
            self._wake.set()

    def look(self, engines: Iterable[Engine]) -> None:
        """Return when ``deaths`` has each of these engines that has ended or is ending."""
        ending = {engine.rank for engine in engines if engine.local and is_ending(engine.pid)}
        deadline = time.monotonic() + _SECONDS_TO_END + SECONDS_TO_EXPLAIN
        while not ending <= self.deaths.keys() and time.monotonic() < deadline:
            time.sleep(_POLL)

    def expect(self, rank: int) -> None:
        """``rank`` is about to be started again: it counts as living, and its death is forgotten."""
        with self._lock:
            self._starts[rank] = self._starts.get(rank, 0) + 1
            self._deaths.pop(rank, None)
            self._reports[rank] = len(failures_of(self._output(), rank))
            self._elsewhere.pop(rank, None)

    def reports(self, rank: int) -> int:
        """How many reports of ``rank`` are of processes before the present one."""
        return self._reports.get(rank, 0)

    def forget(self, rank: int) -> None:
        """``rank`` left the cluster: ignore its process from now on."""
        self.expect(rank)
        with self._lock:
            del self._reports[rank]

    def add(self, rank: int, death: Death) -> None:
        """Count ``rank`` as dead, even if its process still lives."""
        with self._lock:
            self._deaths[rank] = death

    def ended(self, rank: int) -> Death | None:
        """Why the present process of ``rank`` has ended; None while nothing says that it has."""
        output = self._output()
        reports = failures_of(output, rank)
        if len(reports) <= self.reports(rank):
            return None
        with self._lock:
            alone = not self._watched and not self._elsewhere
        return explain_rank(reports[-1], output, self._logs, alone)

    def last(self) -> Death | None:
        """Why the last watched rank ended; None while one may still live."""
        deaths = [self.ended(rank) for rank in self._reports]
        return deaths[-1] if deaths and all(deaths) else None

    def close(self) -> None:
        """Stop watching."""
        self._closed = True
        self._wake.set()
        self._thread.join()
        for descriptor in self._watched:
            os.close(descriptor)
        self._wake.close()

    def _output(self) -> str:
        """The output so far; what was read before if its file is missing or being rewritten."""
        self._written = max(read_text(self._log), self._written, key=len)
        return self._written

    def _watch(self) -> None:
        while not self._closed:
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            with self._lock:
                for descriptor in self._watched:
                    poll.register(descriptor, select.POLLIN)
            if self._elsewhere:
                self._look_elsewhere()
            for descriptor, _ in poll.poll(1000 * _LOOK if self._elsewhere else None):
                if descriptor == self._wake.fileno():
                    self._wake.clear()
                    continue
                with self._lock:
                    rank, start = self._watched.pop(descriptor)
                os.close(descriptor)
                self._explain(rank, start)

    def _look_elsewhere(self) -> None:
        """See which ranks of other hosts have ended, if the log has grown."""
        with suppress(OSError):  # its folder is being made again
            size = self._log.stat().st_size
            if size == self._read:
                return
            self._read = size
        for rank, start in list(self._elsewhere.items()):
            if self.ended(rank):
                with self._lock:
                    self._elsewhere.pop(rank, None)
                self._explain(rank, start)

    def _explain(self, rank: int, start: int) -> None:
        deadline = time.monotonic() + SECONDS_TO_EXPLAIN
        death = self.ended(rank)
        while death is None and not self._closed and time.monotonic() < deadline and self._is_present(rank, start):
            time.sleep(_POLL)
            death = self.ended(rank)
        # Without a report it has ended together with its supervisor.
        death = by_batch_system(death or Death(f"the process of rank {rank} has ended", rank))
        with self._lock:
            if self._is_present(rank, start):  # nobody has started it again meanwhile
                self._deaths[rank] = death
                if not self._watched and not self._elsewhere:
                    self._deaths = {rank: without_others(death) for rank, death in self._deaths.items()}

    def _is_present(self, rank: int, start: int) -> bool:
        return self._starts.get(rank, 0) == start
