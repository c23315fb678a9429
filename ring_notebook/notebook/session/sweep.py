"""A sweep: one cell with all combinations of values of its constants, one after another or side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from time import monotonic, sleep
from typing import Any

from IPython.display import DisplayHandle, display

from ring_notebook.errors import ClusterError, RingError
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.record.cell_constants import with_constants
from ring_notebook.notebook.run.catalogue import find, resumes_from
from ring_notebook.notebook.run.failures import brief
from ring_notebook.notebook.run.run import Run
from ring_notebook.notebook.run.sweep_report import STOPPED, StopOfSweep, SweepReport, Trial
from ring_notebook.notebook.session.cell_queue import QueuedCell
from ring_notebook.notebook.session.run_cell import send_cell
from ring_notebook.notebook.session.session import Session
from ring_notebook.protocol.ringtrain_options import CellOptions
from ring_notebook.text.line_options import MOST_RUNS

_TICK = 0.05  # seconds between two looks at the runs
_REDRAW = 2.0  # seconds: a table and a chart of many runs are tens of kilobytes
_SECONDS_TO_STOP = 30.0
_STOPPED = "the sweep was stopped; with --resume it runs what has not ended well"


def sweep(
    session: Session,
    cell: str,
    options: CellOptions,
    given: Sequence[tuple[str, Sequence[Any]]],
    give: Callable[[SweepReport], None] = lambda _: None,
) -> None:
    """Run a cell with each combination of the values ``given`` for its constants; show one table and one chart of all.

    With ``n`` as many run side by side as the cluster has parts of n ranks, otherwise one after another. A run that
    fails does not end the others. With ``resume``, runs that ended well under the same name with the same cell are
    skipped, and others continue from their last checkpoint if they have one.

    Stop, an interrupt of this process, or of one of the runs, stops all and is raised. Raises RingError for a name that
    is no constant of the cell or is given twice, for too many runs, and what the first run raised when none ended well.
    """
    if options.background or options.setup:
        raise RingError("--sweep cannot be combined with --background or --setup")
    values = dict(given)
    if twice := [name for name, _ in given if [one for one, _ in given].count(name) > 1]:
        raise RingError(f"--sweep has {twice[0]} twice; give all values of a name together, as in lr=0.1,0.01")
    if (runs := prod(map(len, values.values()))) > MOST_RUNS:
        raise RingError(f"a sweep makes at most {MOST_RUNS} runs, and these values make {runs}")
    base = options.name or "sweep"
    trials = []
    for chosen in product(*values.values()):
        own = dict(zip(values, chosen, strict=True))
        trial = Trial(own, "", with_constants(cell, own))
        trial.title = f"{base} {trial.label}"
        trials.append(trial)
    running = _Sweep(session, options, trials)
    give(running.report)
    running.carry_out()


class _Sweep:
    """The runs of one sweep."""

    def __init__(self, session: Session, options: CellOptions, trials: Sequence[Trial]) -> None:
        self.report = SweepReport(trials, options.plot)
        self._session = session
        self._options = options
        self._parts = deque(_parts(session.require(), options))  # parts of the cluster that no run of ours uses
        self._waiting = deque(trials)
        self._running: dict[Run, Sequence[int] | None] = {}  # with the part of each
        self._ended: list[Run] = []
        self._place: DisplayHandle | None = None
        self._drawn = 0.0
        self._stopped = False

    def carry_out(self) -> None:
        if self._options.resume:
            self._waiting = deque(one for one in self.report.trials if not _ended_well(one))
        stop = StopOfSweep(self._ask_to_stop)
        self._place = display(self.report, display_id=True)
        try:
            while self._waiting or self._running:
                if self._stopped:
                    raise KeyboardInterrupt
                self._begin()
                self._look()
                self._draw()
                sleep(_TICK)
        except KeyboardInterrupt as error:
            self._stop()
            raise brief(error, f"KeyboardInterrupt: {_STOPPED}") from None
        except BaseException:
            self._stop()
            raise
        finally:
            stop.remove()
            self._draw(last=True)
        errors = [run.error for run in self._ended if run.error is not None]
        if errors and len(errors) == len(self.report.trials):
            raise errors[0]

    def _ask_to_stop(self) -> None:
        self._stopped = True

    def _begin(self) -> None:
        """Start runs on the parts of the cluster that are free."""
        for _ in range(min(len(self._parts), len(self._waiting))):
            part, trial = self._parts.popleft(), self._waiting.popleft()
            try:
                run = self._sent(trial, part)
            except ClusterError:
                # A rank of this part has died: the trial runs on another part.
                self._waiting.appendleft(trial)
                if not self._parts and not self._running:
                    raise
                continue
            if run is None:  # another cell uses the part
                self._parts.append(part)
                self._waiting.appendleft(trial)
            else:
                trial.record = run.log
                self._running[run] = part
                self._drawn = 0.0

    def _sent(self, trial: Trial, part: Sequence[int] | None) -> Run | None:
        session = self._session
        options = replace(self._options, name=trial.title, n=None, ranks=part, resume=self._continues(trial))
        queued = QueuedCell(trial.title, frozenset(session.require().chosen(None, part)))
        session.waiting.enter(queued)
        if queued.behind:
            session.waiting.leave(queued)
            trial.state = f"waits for {queued.behind}"
            return None
        try:
            return session.waiting.begin(
                queued, partial(send_cell, session, trial.source, options, queued), lambda: None
            )
        except KeyboardInterrupt:
            session.waiting.leave(queued)
            if queued.run is not None:
                self._running[queued.run] = part
            raise

    def _continues(self, trial: Trial) -> bool:
        """Whether the user wants to resume and the run of the same name has left a checkpoint."""
        with suppress(RingError):
            return self._options.resume and bool(resumes_from(trial.title, ""))
        return False

    def _look(self) -> None:
        """Free the parts of runs that have ended, and have the user answer what ranks ask."""
        for run in list(self._running):
            if run.asking:
                run.answer()
            if run.done:
                self._parts.append(self._running.pop(run))
                self._ended.append(run)
                self._drawn = 0.0
                if run.status == "interrupted":
                    raise KeyboardInterrupt

    def _stop(self) -> None:
        for trial in self._waiting:
            trial.state = STOPPED
        for run in self._running:
            run.interrupt()
        until = monotonic() + _SECONDS_TO_STOP
        for run in self._running:
            if not run.stop(max(0.0, until - monotonic())):
                self._session.tell(f"{run.log.title}: {run.describe()}; {run.advice()}.")

    def _draw(self, last: bool = False) -> None:
        now = monotonic()
        if self._place is not None and (last or now - self._drawn > _REDRAW):
            self._drawn = now
            self._place.update(self.report)


def _parts(cluster: Cluster, options: CellOptions) -> list[Sequence[int] | None]:
    """The ranks for runs side by side; None for all ranks."""
    if options.n is None:
        return [options.ranks]
    cluster.check_size(options.n)
    return [range(first, first + options.n) for first in range(0, cluster.n - options.n + 1, options.n)]


def _ended_well(trial: Trial) -> bool:
    """Whether the newest run of this name had the same cell and has ended well; it is the run of the trial then."""
    with suppress(RingError):
        record = find(trial.title)
        if (record.name, record.source, record.status) == (trial.title, trial.source, "ok"):
            trial.record = record
            return True
    return False
