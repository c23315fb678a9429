"""One execution of one cell on the first n ranks: sent, watched, stopped, ended."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from IPython.display import display

from ring_notebook.errors import ClusterError, RunTimeout
from ring_notebook.notebook.panel.panel import Panel
from ring_notebook.notebook.panel.report import figure, mime_bundle, outputs
from ring_notebook.notebook.record.displays import Displayed
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.run.export import Script, export
from ring_notebook.notebook.run.failures import as_exception, brief, rank_list
from ring_notebook.notebook.run.takeover import FollowedLog
from ring_notebook.notebook.timeline.timeline import Timeline
from ring_notebook.records import Failure, Status

if TYPE_CHECKING:
    from ring_notebook.notebook.engines import Engines

__all__ = ["Run"]

_TICK = 0.05
# After the first failure: what the others have to stop by themselves, and then to be stopped (seconds).
_SECONDS_TO_ABORT = 0.3
_SECONDS_TO_STOP = 0.8
# When ranks report that another one has left without a word it may have died, which MPI tells a moment later.
_SECONDS_TO_DIE = 3.0
# An engine that has answered without the record of how its rank ended will not send it any more.
_SECONDS_TO_REPORT = 2.0
# A kernel that exits does not wait for a page that takes nothing in any more.
_SECONDS_TO_LEAVE = 2.0


class Run:
    """A cell on ranks 0..n-1. `Cluster.run` makes and starts it.

    ``status`` is ``running`` and then ``ok``, ``failed`` or ``interrupted``. ``log`` holds the records.
    """

    def __init__(
        self,
        engines: Engines,
        log: RunLog | FollowedLog,
        *,
        timeout: float = 0.0,
    ) -> None:
        self.log = log
        self.status = "running"
        self.error: BaseException | None = None
        self._engines = engines
        self._timeout = timeout
        self._panels: list[Panel] = []
        self._showing = Lock()
        self._ranks = range(log.size)
        self._futures: Sequence[Any] = ()
        self._started = monotonic()
        self._left = False  # this kernel watches it no longer
        self._done = Event()
        self._closed = Event()  # done, and the panel has given place to the report
        self._stops = 0  # how often the ranks were asked to stop
        self._stopped = 0  # how many of these have been passed on
        self._interrupted = False  # somebody asked, not a failure
        self._signalled: set[int] = set()
        self._failed_at = 0.0
        self._timed_out = False
        self._supervisor = Thread(target=self._supervise, name=f"ring-run-{log.run}", daemon=True)

    def start(self, epoch: int, first_line: int, on_records: Callable[[bytes], None]) -> Run:
        """Send the cell to the engines, whose records ``on_records`` takes in; returns at once."""
        recorded = bool(self.log.options.get("timeline"))
        args = (self.log.run, epoch, self.log.size, self.log.source, first_line, recorded)
        self._futures = self._engines.submit("ring_notebook.engine.runner:execute", args, self._ranks, on_records)
        self._supervisor.start()
        return self

    def follow(self) -> Run:
        """Watch a run that another kernel has sent; returns at once."""
        self._supervisor.start()
        return self

    def wait(self) -> Run:
        """Return when the run has ended. Raises what ended it: a rank's own exception, KeyboardInterrupt,
        RunTimeout, or ClusterError when a rank died.

        An interrupt of this process stops the run and is raised when the ranks have stopped. A second one
        shows what each rank is doing; a third one gives up on the ranks.
        """
        for attempt in range(1, 4):
            try:
                self._closed.wait()
                break
            except KeyboardInterrupt:
                self.interrupt()
                if attempt == 2:
                    print(f"Still stopping: {self.describe()}. Interrupt again to give up on the ranks.")  # noqa: T201
                elif attempt == 3:
                    raise brief(
                        KeyboardInterrupt(),
                        f"Gave up on ranks that do not stop: {self.describe()}. `%ring restart` ends them.",
                    ) from None
        if self.error is not None:
            raise self.error
        return self

    def show(self, plot: Sequence[str] = (), live_after: float = 0.0, apart: bool = False) -> None:
        """Show the run in the current cell: a live panel, and its still report when it has ended.

        A run that ends within ``live_after`` seconds shows its report only. ``plot`` names the metrics to
        chart. With ``apart`` the report leaves out what the ranks have displayed, for `show_displays`.
        """
        self._done.wait(live_after)
        with self._showing:
            if not self.done:
                self._panels.append(Panel(self.log, plot=plot, stop=self.interrupt, displays=not apart))
                self._panels[-1].show()
                return
            display(mime_bundle(self.log, plot), raw=True)
        if not apart:
            self.show_displays()

    def show_displays(self) -> None:
        """Show what the ranks have displayed as outputs of the current cell, the newest ones of a great many."""
        for data, metadata in outputs(self.log):
            display(data, metadata=metadata, raw=True)

    def stop(self, timeout: float = 5.0) -> None:
        """Interrupt every rank and return when the run has ended; does nothing when it has.

        After ``timeout`` seconds it returns all the same, and says what the ranks are doing. Callable from any thread.
        """
        if self.done:
            return
        self.interrupt()
        if not self._closed.wait(timeout):
            print(f"Still stopping: {self.describe()}. `%ring restart` ends ranks that do not stop.")  # noqa: T201

    def interrupt(self) -> None:
        """Interrupt every rank of the run; returns at once. Callable from any thread."""
        self._interrupted = True
        self._stops += 1

    def leave(self) -> None:
        """Watch the run no longer; it goes on, and another kernel may take it over. Does nothing when it has ended."""
        self._left = True
        self._closed.wait(_SECONDS_TO_LEAVE)

    @property
    def done(self) -> bool:
        """Whether the run has ended, or this kernel has left it."""
        return self._done.is_set()

    def settle(self, timeout: float) -> bool:
        """Wait until no engine is occupied by this run any more; False when one still is after ``timeout`` s."""
        deadline = monotonic() + timeout
        while self.busy and monotonic() < deadline:
            sleep(0.005)
        return not self.busy

    @property
    def busy(self) -> list[int]:
        """The ranks whose engines are still occupied by this run."""
        if not self._futures:  # another kernel has sent it
            return [] if self.done else [rank for rank in self._ranks if rank not in self.log.ended()]
        return [rank for rank, future in zip(self._ranks, self._futures, strict=False) if not future.done()]

    @property
    def directory(self) -> Path:
        """Where the records of the run are."""
        return self.log.directory

    @property
    def metrics(self) -> Any:
        """Every logged row: a pandas DataFrame where pandas is installed, else a list of dicts."""
        return self.log.metrics()

    @property
    def displays(self) -> list[Displayed]:
        """Everything that the ranks have displayed, in the order in which it came; a notebook shows each as it is."""
        return self.log.displays()

    @property
    def summary(self) -> dict[str, Any]:
        """What the run came to; empty while it goes on."""
        return self.log.summary

    def plot(self, *names: str) -> Any:
        """A figure of the named metrics, or of all."""
        return figure(self.log, names)

    def export(self, path: str | Path) -> Script:
        """Write the cell, behind the set-up cells before it, to ``path`` as a script for ``ringrun``.

        Raises RingError when ``path`` is a file that was not exported.
        """
        return export(self.log, path)

    def timeline(self) -> Timeline:
        """What all ranks did when, and why it is slow, of a run with ``--timeline``.

        Raises FileNotFoundError when the run was not recorded, or has not ended.
        """
        return Timeline(self.log.directory)

    def describe(self) -> str:
        """What each rank that has not ended is doing, in one line."""
        ended, statuses = self.log.ended(), self.log.statuses()
        return (
            "; ".join(f"rank {rank} {_doing(statuses.get(rank))}" for rank in self._ranks if rank not in ended)
            or "all ranks have ended"
        )

    def __repr__(self) -> str:
        return f"<Run {self.log.name or self.log.run} on {self.log.size} ranks: {self.status}>"

    def _supervise(self) -> None:
        try:
            self._watch()
        finally:
            self._finish()  # whatever happens to the watch, nobody waits for ever

    def _watch(self) -> None:
        """Return when the run has ended, or nothing more is to be expected of its ranks."""
        answered = 0.0
        while not self.log.wait_ended(self._ranks, _TICK):
            now = monotonic()
            if self._left or self._engines.trouble():
                break
            if self._futures and all(future.done() for future in self._futures):
                answered = answered or now
                if now - answered > _SECONDS_TO_REPORT:
                    break
            if self._timeout and not self._timed_out and now - self._started > self._timeout:
                self._timed_out = True
                self.interrupt()
            if self._failed(now) > (_SECONDS_TO_STOP if self._cause_known() else _SECONDS_TO_DIE):
                break
            self._pass_on_stop()

    def _failed(self, now: float) -> float:
        """Seconds since the first rank failed; asks the others to stop when they do not by themselves."""
        if not self._failed_at:
            if not self._failures():
                return 0.0
            self._failed_at = now
        elapsed = now - self._failed_at
        if elapsed > _SECONDS_TO_ABORT and not self._stops:
            self._stops += 1
        return elapsed

    def _failures(self) -> list[Failure]:
        """The ranks' failures. Those of ranks that only stopped with an interrupted one are none."""
        failures = self.log.failures()
        return failures if not self._interrupted or self._cause_known() else []

    def _cause_known(self) -> bool:
        """Whether a rank failed by itself, and did not only stop because of another one."""
        return any(not failure.aborted for failure in self.log.failures())

    def _pass_on_stop(self) -> None:
        """Interrupt the ranks that are at work. One that has not begun yet is interrupted when it does."""
        if self._stops > self._stopped:
            self._stopped = self._stops
            self._signalled.clear()
        if self._stopped:
            ended = self.log.ended()
            # A run of another kernel began before it was followed.
            begun = self.log.statuses() if self._futures else self._ranks
            wanted = [rank for rank in begun if rank not in ended and rank not in self._signalled]
            self._signalled.update(wanted)
            self._engines.signal(signal.SIGINT, wanted)

    def _finish(self) -> None:
        try:
            self.status, self.error = self._outcome()
            if self.status == "running":
                self.log.close()
            else:
                self.log.finish(self.status, str(self.error or ""))
        finally:
            with self._showing:
                self._done.set()
                for panel in self._panels:
                    panel.close()
            self._closed.set()

    def _outcome(self) -> tuple[str, BaseException | None]:
        ended, failures = self.log.ended(), self._failures()
        missing = [rank for rank in self._ranks if rank not in ended]
        if missing and self._left:
            message = "this notebook has left the cluster; the run goes on in it, and `%ring attach` shows it again"
            return "running", brief(ClusterError(message), f"ClusterError: {message}")
        if missing and not self._cause_known() and (trouble := self._engines.trouble()):
            return "failed", brief(ClusterError(trouble), f"ClusterError: {trouble}")
        if failures:
            return "failed", as_exception(failures, missing)
        if self._timed_out:
            message = f"the run took longer than --timeout {self._timeout:g} s and was stopped"
            return "failed", brief(RunTimeout(message), f"RunTimeout: {message}")
        if missing:
            message = f"no record of how {rank_list(missing)} ended: {self._answers(missing)}"
            return "failed", brief(ClusterError(message), f"ClusterError: {message}")
        interrupted = [rank for rank, end in ended.items() if end.status == "interrupted"]
        if interrupted:
            places = sorted({int(ended[rank].summary["line"]) for rank in interrupted})
            message = f"stopped at line {', '.join(map(str, places))} of the cell; variables and cluster live on"
            return "interrupted", brief(KeyboardInterrupt(message), f"KeyboardInterrupt: {message}")
        return "ok", None

    def _answers(self, ranks: Sequence[int]) -> str:
        answers = dict(enumerate(self._futures))
        results = {rank: answers[rank].result() for rank in ranks if rank in answers and answers[rank].done()}
        return "; ".join(f"rank {rank}: {result}" for rank, result in results.items() if result) or "nothing came"


def _doing(status: Status | None) -> str:
    if status is None:
        return "has not begun"
    place = f"is at line {status.line}" if status.line else "is beginning or ending the cell"
    if status.waiting:
        waiting = status.waiting
        place += f", waiting in {waiting.get('operation')} {waiting.get('name') or ''}".rstrip()
        if missing := waiting.get("missing"):
            place += f" for {rank_list(missing)}"
    return place
