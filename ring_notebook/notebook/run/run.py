"""`Run`: what a user asks of one execution of one cell."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread, current_thread, main_thread
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

from ring_notebook.config import config
from ring_notebook.errors import KnobError, RingError
from ring_notebook.files import snapshot_files
from ring_notebook.notebook.deferred_interrupt import DeferredInterrupt
from ring_notebook.notebook.note import Note
from ring_notebook.notebook.panel.panel import Panel
from ring_notebook.notebook.panel.report import figure, mime_bundle, outputs
from ring_notebook.notebook.record.displays import Displayed
from ring_notebook.notebook.record.logged_rows import Metrics
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.record.run_record import RunStatus
from ring_notebook.notebook.record.run_view import RunView
from ring_notebook.notebook.run import late_lines, trackers
from ring_notebook.notebook.run.answering import Answering
from ring_notebook.notebook.run.export import Script, export, set_up_before
from ring_notebook.notebook.run.failures import brief
from ring_notebook.notebook.run.knob_changes import send_change
from ring_notebook.notebook.run.plain_state import plain_state
from ring_notebook.notebook.run.takeover import FollowedLog
from ring_notebook.notebook.run.timeline import Timeline
from ring_notebook.notebook.run.watch import Watch
from ring_notebook.protocol.knobs import HAS_STEPS
from ring_notebook.protocol.records import Change, Status
from ring_notebook.text.words import ranks

if TYPE_CHECKING:
    from ring_notebook.notebook.engines import Engines

_ASKS = ", waits for an answer (`%ring debug`)"
_SECONDS_TO_LOOK = 0.05  # for questions of ranks
_SECONDS_TO_SEE = 0.2  # that a snapshot has been made
# A kernel that exits does not wait longer for a page that no longer answers.
_SECONDS_TO_LEAVE = 2.0


def _kept_as(name: str) -> list[snapshot_files.Snapshot]:
    """The snapshots of this name in this folder, oldest first."""
    return [one for one in snapshot_files.found(snapshot_files.root())[0] if one.name == name]


class Run:
    """One execution of one cell on ranks 0..n-1, as `Cluster.run` and ``%%ringtrain --out run`` give it.

    While it runs: `set`, `pause`, `resume`, `stop`, `interrupt`, `wait`, `answer`, `asking`, `describe`, `advice`.
    Results, complete when it has ended: `status`, `error`, `view`, `state`, `summary`, `metrics`, `knobs`, `changes`,
    `displays`, `plot`, `timeline`, `export`.
    """

    def __init__(
        self,
        engines: Engines,
        log: RunLog | FollowedLog,
        futures: Sequence[Any] = (),
        *,
        timeout: float = 0.0,
        questions: Answering | None = None,
    ) -> None:
        self.log = log
        self._engines = engines
        self.ranks = frozenset(engine.rank for engine in engines.all)
        """The ranks of the cluster that it is for."""
        self._questions = questions or Answering(engines, polls=True)
        self._panels: list[Panel] = []
        self._showing = Lock()
        self._closed = Event()  # ended, or left by this kernel; set before the panels become reports
        every = float(log.options.get("snapshot") or 0.0)
        self._watch = Watch(
            engines, log, futures, timeout, self._questions, self._close_panels, (every, self._snapshot_in_time)
        )

    @property
    def status(self) -> RunStatus:
        """``running``, then ``ok``, ``failed`` or ``interrupted``."""
        return self._watch.verdict.status

    @property
    def error(self) -> BaseException | None:
        """What `wait` raises: why the run has failed or was interrupted; None while it runs and when it is ok."""
        return self._watch.verdict.error

    @property
    def done(self) -> bool:
        """Whether the run has ended, or this kernel has left its cluster."""
        return self._closed.is_set()

    def wait(self) -> Run:
        """Return this run when it has ended.

        Raises what ended it: a rank's own exception, KeyboardInterrupt, RunTimeout, or ClusterError when a rank died.
        An interrupt of this process stops the run and is raised when the ranks have stopped. A second one prints what
        each rank is doing; a third one returns at once and leaves the ranks as they are. Questions of ranks (`input()`,
        `breakpoint()`) are asked here.
        """
        for attempt in range(1, 4):
            try:
                with self._questions.attended():
                    while not self._watch.ended.wait(_SECONDS_TO_LOOK):
                        self._questions.answer_one()
                break
            except KeyboardInterrupt:
                self.interrupt()
                if attempt == 2:
                    print(f"Still stopping: {self.describe()}. Interrupt again to stop waiting; then {self.advice()}.")  # noqa: T201
                elif attempt == 3:
                    raise brief(
                        KeyboardInterrupt(),
                        f"Stopped waiting for ranks that do not stop: {self.describe()}; {self.advice()}.",
                    ) from None
        if self.error is not None:
            raise self.error
        return self

    def answer(self) -> bool:
        """Have the user answer what ranks ask, as `wait` does; returns as soon as none asks or is held by a debugger.

        Returns whether one did. An interrupt of this process stops the run and is raised.
        """
        asked = False
        self._questions.refresh()
        try:
            with self._questions.attended():
                while (self.asking or self._watch.held) and not self.done:
                    asked = True
                    self._questions.answer_one()
                    self._watch.ended.wait(_SECONDS_TO_LOOK)
        except KeyboardInterrupt:
            self.interrupt()
            raise
        return asked

    def asks(self) -> str:
        """Questions of ranks that nobody answers, and what to do; empty if none. Asks ranks of an attached cluster."""
        self._questions.refresh()
        return self._questions.sentence()

    @property
    def asking(self) -> Sequence[int]:
        """The ranks that wait for an answer of the user: `input()` or `breakpoint()` in the cell."""
        return self._questions.waiting

    @property
    def knobs(self) -> dict[str, Any]:
        """The values of the knobs of the run by name, see ``ring.knob``; their last ones when it has ended."""
        return {name: knob.value for name, knob in self.view.knobs.items()}

    @property
    def changes(self) -> list[Change]:
        """Every change of knobs, pause and resume that the ranks have taken, in order, each once."""
        return self.log.changed()

    def _snapshot_in_time(self) -> None:
        with suppress(RingError):  # it has not begun, or ends
            self.snapshot()

    def set(self, /, **values: Any) -> dict[str, Any]:
        """Change knobs: ``run.set(lr=0.05)``. All ranks take the new values at the end of the same step, the next one.

        Returns them as the knobs take them, at once; `changes` has the step when the ranks have taken them. Raises
        KnobError for a knob that does not exist or does not take its value, and RingError when the run has ended.
        """
        return self.steer("set", values, "run.set")

    def pause(self) -> None:
        """Have all ranks wait at the end of the same step, until `resume` or `stop`; returns at once."""
        self.steer("pause", {}, "run.pause")

    def resume(self) -> None:
        """End a pause; returns at once."""
        self.steer("resume", {}, "run.resume")

    def snapshot(self, name: str = "") -> None:
        """Have all ranks keep their variables after the same step, the next one; returns at once.

        The calling cell says later what was kept. Without a name it is called ``RUN@STEP``: only the newest of these
        stay, and the output of the run says what was kept. Raises RingError when the run has ended, or the ranks do not
        take it.
        """
        record = {"id": self.log.run, "name": self.log.title, "source": self.log.source, "options": self.log.options}
        about = {**snapshot_files.about(name, set_up_before(self.log)), "run": record, "automatic": not name}
        told = bool(name) and get_ipython() is not None and current_thread() is main_thread()
        before = {one.about["time"] for one in _kept_as(name)} if told else set()
        self.steer("snapshot", {"folder": str(snapshot_files.root()), "about": about, "told": told}, "snapshot")
        if told:
            note = Note()
            note.tell(f"Run {self.log.title} keeps its variables at its next step.")
            Thread(target=self._tell_kept, args=(name, before, note), name="ring-kept", daemon=True).start()

    def _tell_kept(self, name: str, before: Collection[float], note: Note) -> None:
        """Tell what the snapshot of this name keeps, when there is one that was not made ``before``."""
        ended = False
        while True:
            made = [one for one in _kept_as(name) if one.about["time"] not in before]
            if made:
                return note.tell(snapshot_files.kept_text(made[-1]))
            if ended:
                points = max((one.extra.get("points", 0) for one in self.log.statuses().values()), default=0)
                ends = "before its next step" if points else f"without a step of all ranks ({HAS_STEPS})"
                return note.tell(f"No snapshot {name}: run {self.log.title} has ended {ends}.")
            ended = self._watch.ended.wait(_SECONDS_TO_SEE)

    def steer(self, action: str, values: Mapping[str, Any], who: str) -> dict[str, Any]:
        """What `set`, `pause` and `resume` do; ``who`` is recorded."""
        if self.done:
            raise KnobError(f"run {self.log.title} has ended, so nothing is changed")
        return send_change(self._engines, self.log.run, action, values, who)

    def stop(self, timeout: float = 5.0) -> bool:
        """Interrupt every rank and wait until the run has ended, at most ``timeout`` seconds.

        Returns whether it has ended; when not, `describe` says what the ranks are doing, and `advice` what ends them.
        Callable from any thread.
        """
        if not self.done:
            self.interrupt()
        return self._watch.ended.wait(timeout)

    def interrupt(self) -> None:
        """Interrupt every rank; returns at once. Callable from any thread."""
        self._watch.interrupt()

    def describe(self) -> str:
        """What each rank that has not ended is doing, in one line."""
        ended, statuses = self.log.ended(), self.log.statuses()
        running = [rank for rank in range(self.log.size) if rank not in ended]
        asking = self.asking
        doing = {rank: _doing(statuses.get(rank)) + _ASKS * (rank in asking) for rank in running}
        return "; ".join(f"rank {rank} {text}" for rank, text in doing.items()) or "all ranks have ended"

    def advice(self) -> str:
        """What ends the ranks that do not stop, as a part of a sentence."""
        busy = self.busy
        if self._engines.end is None or not busy:
            return "`%ring restart` ends them"
        text = f"`%ring restart --rank {','.join(map(str, busy))}` ends {ranks(busy)} alone and starts "
        text += f"{'it' if len(busy) == 1 else 'them'} again"
        limit = config().stop_limit
        return text + (f", which happens {limit:g} s after the interrupt by itself (RING_STOP_LIMIT)" if limit else "")

    @property
    def ended_ranks(self) -> Sequence[int]:
        """The ranks of the cluster that were ended because they had not stopped within RING_STOP_LIMIT."""
        return self._watch.ended_ranks

    @property
    def view(self) -> RunView:
        """The run at this moment: its ranks, curves, output and failures. Complete when the run has ended."""
        return self.log.view()

    def state(self) -> dict[str, Any]:
        """The run at this moment as plain data for ``json.dumps``; docs/tasks/tools.md lists its keys."""
        return plain_state(self.log, self._watch.verdict.text, self.asking)

    @property
    def summary(self) -> dict[str, Any]:
        """How the run ended: status, seconds, samples, samples/s, and the last values of each rank; empty before."""
        return self.log.summary

    @property
    def metrics(self) -> Metrics:
        """Every logged row, a sequence; ``run.metrics.to_pandas()`` gives a DataFrame."""
        return self.log.metrics()

    @property
    def loads(self) -> Metrics:
        """What the machine of each rank did, a row about every second: processor, memory, GPU, disk, network.

        The names and units are those of `records.Load`; ``run.loads.to_pandas()`` gives a DataFrame.
        """
        return self.log.loads()

    @property
    def displays(self) -> list[Displayed]:
        """Everything that the ranks have displayed, oldest first; a notebook shows each as the rank did."""
        return self.log.displays()

    @property
    def media(self) -> list[Displayed]:
        """All images, figures, histograms and texts of ``ring.log``, oldest first; ``logged`` has name and step."""
        return self.log.media()

    @property
    def directory(self) -> Path:
        """The folder of the run's records."""
        return self.log.directory

    @property
    def params(self) -> dict[str, Any]:
        """The hyper-parameters of the run, see ``ring.log_params``."""
        return self.log.params

    def to_csv(self, path: str | Path) -> Path:
        """Write every logged row to ``path``: rank, time, step and a column for each metric."""
        return trackers.to_csv(self.log, path)

    def to_media(self, folder: str | Path = "") -> Path:
        """Write the images, figures, histograms and texts of ``ring.log`` as files; returns the folder.

        By default it is ``media`` in the folder of the run. A file is called ``input-step-120-rank-0.png``.
        """
        return trackers.to_media(self.log, folder)

    def to_pandas(self) -> Any:
        """Every logged row as a DataFrame, see `Metrics.to_pandas`."""
        return self.metrics.to_pandas()

    def to_tensorboard(self, directory: str | Path = "runs") -> Path:
        """Write the run as TensorBoard's event files below ``directory``; returns their folder."""
        return trackers.to_tensorboard(self.log, directory)

    def to_wandb(self, **options: Any) -> Any:
        """Log the run to Weights & Biases, with the options of ``wandb.init``; returns the finished wandb run."""
        return trackers.to_wandb(self.log, **options)

    def to_mlflow(self, **options: Any) -> str:
        """Log the run to MLflow, with the options of ``mlflow.start_run``; returns the id of MLflow's run."""
        return trackers.to_mlflow(self.log, **options)

    def plot(self, *names: str) -> Any:
        """Charts of the named metrics, of the first ones without names; ``loss+val_loss`` is one chart of both.

        Raises KeyError for a metric that was not logged.
        """
        return figure([self.log], names)

    def export(self, path: str | Path) -> Script:
        """Write the cell and the set-up cells before it to ``path`` as a script for ``ringrun``.

        Raises RingError when ``path`` exists and was not exported.
        """
        return export(self.log, path)

    def timeline(self) -> Timeline:
        """What all ranks did when, and why the run is slow; of a run with ``--timeline``.

        Without it, for a run that failed, was interrupted or is in progress: the last operations of all ranks, and
        where ranks part. Raises FileNotFoundError when nothing is known.
        """
        if self.done:
            return Timeline.of_run(self.log.directory)
        told = self._engines.call_beside("ring_notebook.core.trace:tell_operations", self.log.run)
        return Timeline([event for events in told if events for event in events])

    def show(
        self,
        plot: Sequence[str] = (),
        live_after: float = 0.0,
        apart: bool = False,
        places: tuple[DisplayHandle, DisplayHandle] | None = None,
    ) -> None:
        """Show the run in the current cell, or in ``places``: a live panel, which becomes a report when it has ended.

        A run that ends within ``live_after`` seconds shows its report only. ``plot`` names the metrics to chart. With
        ``apart`` the report leaves out what the ranks have displayed, which `show_displays` shows, and why the run has
        failed, which `wait` raises.
        """
        self._closed.wait(live_after)
        with self._showing:
            if not self.done:
                asks = self._questions.sentence
                with DeferredInterrupt() as interrupt:  # half a panel would never become a report
                    calls: dict[str, Any] = {"stop": self.interrupt, "steer": partial(self.steer, who="panel")}
                    self._panels.append(Panel(self.log, plot=plot, asks=asks, apart=apart, **calls))
                    self._panels[-1].show(places)
                if interrupt.came:
                    raise KeyboardInterrupt
                return
            bundle = mime_bundle(self.log, plot, error=not apart, displays=places is not None)
            if places is not None:
                places[1].update(bundle, raw=True)
                return
            display(bundle, raw=True)
        if not apart:
            self.show_displays()

    def show_displays(self) -> None:
        """Show what the ranks have displayed as outputs of the current cell, the newest of very many."""
        for data, metadata in outputs(self.log):
            display(data, metadata=metadata, raw=True)

    def show_late(self) -> None:
        """Print below the current cell what threads and children of the run write when it has ended; returns at once.

        Without this call, the next cell on these ranks prints it.
        """
        if not self.done or late_lines.is_left(self.log):
            late_lines.follow(self.log, self._engines, self._watch.ended)

    def leave(self) -> None:
        """Stop watching the run, which continues; another kernel may attach to it. Does nothing when it has ended."""
        self._watch.leave()
        self._watch.ended.wait(_SECONDS_TO_LEAVE)

    @property
    def busy(self) -> list[int]:
        """The engines that still execute this run, by their ranks in the cluster."""
        return self._watch.busy

    def wait_idle(self, timeout: float) -> bool:
        """Wait until no engine executes this run any more; False when one still does after ``timeout`` seconds."""
        return self._watch.wait_idle(timeout)

    def _repr_html_(self) -> str:
        """The report, or what there is of it while the run is in progress: for a run as the last line of a cell."""
        return mime_bundle(self.log, displays=True)["text/html"]

    def __repr__(self) -> str:
        return f"<Run {self.log.title} on {self.log.size} ranks: {self.status}>"

    def _close_panels(self) -> None:
        with self._showing:
            self._closed.set()
            for panel in self._panels:
                panel.close()


def _doing(status: Status | None) -> str:
    if status is None:
        return "has not begun"
    place = f"is at line {status.line}" if status.line else "is beginning or ending the cell"
    if status.waiting:
        waiting = status.waiting
        place += f", waiting in {waiting.get('operation')} {waiting.get('name') or ''}".rstrip()
        if missing := waiting.get("missing"):
            place += f" for {ranks(missing)}"
    return place
