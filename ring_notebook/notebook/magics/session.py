"""The state of one notebook behind its magics: its cluster, its last run, its set-up cells."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from threading import Thread
from typing import Any

from IPython.core.error import StdinNotImplementedError
from IPython.display import display

from ring_notebook.energy import energy_text
from ring_notebook.errors import ClusterError, RingError
from ring_notebook.launch.batch_job import job_name, walltime, who_ended_it
from ring_notebook.launch.batch_systems import login_node_of
from ring_notebook.launch.launchers.hosts import Host, parse_hosts
from ring_notebook.notebook.cluster import cluster_folders, snapshots
from ring_notebook.notebook.cluster.batch import BatchJob
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.cluster.default_size import choose_size
from ring_notebook.notebook.cluster.stacks import render
from ring_notebook.notebook.cluster.submitted import submit
from ring_notebook.notebook.magics.cell_queue import CellQueue, QueuedCell
from ring_notebook.notebook.magics.cells import check_syntax
from ring_notebook.notebook.magics.live_lines import ElapsedLine, Note
from ring_notebook.notebook.magics.session_job import SessionJob, export_with_job, request_of
from ring_notebook.notebook.panel.chart_area import load_charts
from ring_notebook.notebook.record.choices import CellOptions
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.run.catalogue import find, runs_directory
from ring_notebook.notebook.run.classroom import Classroom
from ring_notebook.notebook.run.export import export, set_up_before, set_up_cells, set_up_runs
from ring_notebook.notebook.run.failures import brief, primary
from ring_notebook.notebook.run.knob_changes import listing
from ring_notebook.notebook.run.notices import show_in_lab
from ring_notebook.notebook.run.run import Run
from ring_notebook.notebook.run.scaling_report import ScalingReport, measured_run
from ring_notebook.notebook.run.send import spoken_name
from ring_notebook.notebook.run.sharing import Sharing
from ring_notebook.notebook.run.timeline import Timeline
from ring_notebook.notebook.style import ago, duration, shown
from ring_notebook.notebook.table import Listing
from ring_notebook.prediction import compare
from ring_notebook.scaling import Kind, Measured, write_csv
from ring_notebook.words import plural, rank_list
from ring_notebook.words import ranks as rank_text

# A cell that ends sooner than this shows its report only: widgets would cost more than the run.
_LIVE_AFTER = 0.1


class Session:
    """The state of one notebook. ``run`` is the newest run."""

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        self.run: Run | None = None
        self.default = False  # whether cells without a magic run on the ranks
        self._syncs = False  # before each cell
        self.setup: list[RunRecord] = []  # runs of the set-up cells
        self.sharing = Sharing(lambda: self.run.log if self.run is not None else None)
        self._classroom: Classroom | None = None
        self.waiting = CellQueue(self._in_progress, self._ranks_to_come)  # cells that wait
        self._names: dict[str, list[str]] = {}
        self._job = SessionJob(self)
        self._job_ended = ""  # why there is no cluster any more

    def start(
        self,
        n: int | None = None,
        hosts: str = "",
        keep: bool = False,
        sync: bool = False,
        here: bool = False,
        batch: str = "",
        on: str = "",
        **job: Any,
    ) -> str:
        """Start a cluster; returns how many engines and why, or that a cluster like this is running already.

        With ``sync`` each cell first brings modules that have changed to the ranks. With ``batch`` its hosts are those
        of a ``job`` of this site, and this returns as soon as that is submitted; ``on`` is an engine that lends places
        for the ranks. Without ``here`` no engine starts on a login node.

        Raises ClusterError when a different one is running.
        """
        self._syncs = sync
        if batch and on:
            raise ClusterError("--batch and --on exclude each other: both choose the hosts")
        if batch:
            if hosts:
                raise ClusterError("--hosts and --batch exclude each other: the batch system chooses the hosts")
            if not job.get("dry_run"):
                self._job.require_none()
                if self.cluster is not None and self.cluster.running:
                    raise ClusterError(f"A cluster of {_engines(self.cluster)} is running. `%ring stop` gives it up")
            return self._job.submit(batch, n, keep, **job)
        if given := [name for name, value in job.items() if value]:
            options = ", ".join({"nodes": "-N", "dry_run": "--dry-run"}.get(name, f"--{name}") for name in given)
            raise ClusterError(f"{options}: only of a batch job; add --batch slurm, pbs, lsf or the name of a site")
        if self.cluster is not None and self.cluster.running:
            return self._running(self.cluster, n, hosts, keep)
        if self.cluster is not None:
            self.cluster.stop()
            self.cluster = None
        self._job.require_none()
        if not (here or hosts or on) and (system := login_node_of()):
            raise ClusterError(
                f"this host is a login node of {system.name}, which others work on: `%ring start --batch "
                f"{system.name.lower()} -N 2` starts engines in a batch job, `%ring start --here` on this host"
            )
        left = cluster_folders.left_behind()
        if left and keep and n in (None, left["n"]) and not hosts:
            return f"{self.attach(left['id'])} This notebook had kept it; `%ring restart` gives a fresh one."
        cluster = Cluster(n, hosts, keep=keep, on=on)
        walltime().warn = self.before_walltime
        Thread(target=load_charts, name="ring-preload", daemon=True).start()  # while the engines start
        with ElapsedLine("Starting the engines:"):
            self.cluster = cluster.start()
        hint = f"\n{self.left_behind()}" if left else ""
        return f"Started {_engines(cluster)} ({_described(cluster)}) in {cluster.seconds_to_start:.1f} s.{hint}"

    def before_walltime(self, text: str) -> None:
        """Warn that the job ends soon, as ``text`` says, and keep the variables."""
        show_in_lab(f"{text}. {self.keep_before_end('walltime')}", "warning")

    def keep_before_end(self, name: str) -> str:
        """Keep the variables before the engines end: of runs in progress as ``RUN@STEP``, else under ``name``.

        Returns what to tell the user.
        """
        runs = self._in_progress()
        try:
            for run in runs:
                run.snapshot()
            if runs:
                return "Its runs keep their variables at their next steps."
            return snapshots.described(self.require().snapshot(name, set_up_cells(self.setup))).split("\n")[0]
        except RingError as error:
            return f"No snapshot: {error}."

    def _ranks_to_come(self) -> str:
        return self._job.to_come.job.name if self._job.to_come is not None else ""

    def hosts(self, named: str = "") -> Sequence[Host]:
        """The hosts that are named, else those of the cluster, else those of the batch job; empty for this alone."""
        if named:
            return parse_hosts(named)
        return self.cluster.hosts if self.cluster is not None else choose_size().hosts

    def left_behind(self) -> str:
        """One line on the cluster that this notebook's kernel before this one has left; empty without one."""
        if job := BatchJob.left_behind():
            return f"{job.name} for {plural(job.request.n, 'engine')} of this notebook was kept: `%ring attach`."
        left = cluster_folders.left_behind()
        where = "this notebook" if left.get("notebook") else "this folder"
        return f"A cluster of {plural(left['n'], 'engine')} from {where} is running: `%ring attach`." if left else ""

    def _running(self, cluster: Cluster, n: int | None, hosts: str, keep: bool) -> str:
        """The answer to a start while ``cluster`` runs. Raises ClusterError when a different one was requested."""
        if cluster.serves(n, hosts, keep):
            return f"A cluster of {_engines(cluster)} is running already."
        restart = f" or change its size: `%ring restart -n {n}`" if cluster.serves(None, hosts, keep) else ""
        raise ClusterError(
            f"a different cluster of {_engines(cluster)} is running; stop it first: `%ring stop`{restart}"
        )

    def set_default(self, on: bool | None) -> str:
        """Run cells without a magic on the ranks, or here; None changes nothing. Returns where they run."""
        if on is not None:
            self.default = on
        if not self.default:
            return "Cells run in this notebook; %%ringtrain runs one on the ranks."
        where = f"the {_engines(self.cluster)}" if self.cluster is not None else "all engines; the first starts them"
        return f"Cells run on {where}. %%local runs one in this notebook, `%ring default off` all."

    def attach(self, cluster: str = "") -> str:
        """Attach to a cluster that another kernel has started, and show its newest run; see `Cluster.attach`.

        In a notebook that has a cluster: show its last run again, with everything that the ranks have printed.
        """
        if self.cluster is not None and self.cluster.running:
            text = f"This notebook has a cluster of {_engines(self.cluster)}."
            if cluster:
                raise ClusterError(f"{text} `%ring stop` gives it up, then `%ring attach {cluster}` takes another.")
            return f"{text} {self._show_run() or 'No cell has run yet.'}"
        if not cluster and self._job.followed is None and (job := BatchJob.left_behind()):
            return self._job.attach(job)
        return self.attached(Cluster.attach(cluster))

    def attached(self, cluster: Cluster) -> str:
        """Take a cluster that another kernel has started, and show its newest run."""
        self.cluster = cluster
        self.run = self.cluster.last_run
        self.setup = set_up_cells(set_up_runs(runs_directory(), self.cluster.directory.name))
        return f"Attached to {_engines(self.cluster)}. {self._show_run() or 'No run is in progress.'}"

    def _show_run(self) -> str:
        """Show the last run; returns whether it has ended, an empty text without one."""
        if self.run is None:
            return ""
        self.run.show(self.run.log.options.get("plot", ()), _LIVE_AFTER)
        if self.run.done:
            return f"Run {self.run.log.title} has ended."
        return f"Run {self.run.log.title} is in progress. {self.run.asks()}".rstrip()

    def answer(self) -> str:
        """Have the user answer what ranks of the run in progress ask, until none asks any more."""
        asked = [run for run in self._in_progress() if run.answer()]
        lines = [f"Run {run.log.title} {'has ended' if run.done else 'continues'}." for run in asked]
        return "\n".join(lines) or "No rank asks anything."

    def interrupt(self) -> str:
        """Stop the runs in progress and keep the cluster; returns whether they have stopped."""
        waiting = self.waiting.cells
        lines = [
            f"Run {run.log.title} has ended."
            if run.stop()
            else f"Run {run.log.title} is still stopping: {run.describe()}; {run.advice()}."
            for run in self._in_progress()
        ]
        if lines and waiting:
            lines.append(
                f"Next runs cell {waiting[0].name}; `%ring queue` lists what waits, `%ring queue cancel` ends it."
            )
        return "\n".join(lines) or "No run is in progress."

    def set(self, values: Mapping[str, str], name: str = "") -> str:
        """Change knobs of the run in progress, or of the one called ``name``; returns what was changed."""
        run = self._steered(name)
        read = run.steer("set", values, "%ring set")
        changed = ", ".join(f"{knob} = {shown(value)}" for knob, value in read.items())
        return f"{changed} from the next step of all ranks of run {run.log.title} on."

    def knobs(self, name: str = "") -> Listing:
        """The knobs of the run in progress, else of the last one, or of the one called ``name``."""
        log = self._steered(name).log if self._in_progress() else self._named(name)
        return listing(log.title, log.view())

    def knob_names(self) -> list[str]:
        """The knobs of the runs in progress."""
        return [name for run in self._in_progress() for name in run.view.knobs]

    def pause(self, name: str = "") -> str:
        """Have all ranks of the run in progress wait at the end of the same step."""
        run = self._steered(name)
        run.steer("pause", {}, "%ring pause")
        return f"Run {run.log.title} pauses at the end of its next step; `%ring resume` ends that."

    def resume(self, name: str = "") -> str:
        """End the pause of the run in progress."""
        run = self._steered(name)
        run.steer("resume", {}, "%ring resume")
        return f"Run {run.log.title} continues."

    def _steered(self, name: str) -> Run:
        """The run in progress, of several the one that begins with ``name``. Raises RingError where that is not one."""
        runs = self._in_progress()
        found = [run for run in runs if run.log.title.startswith(name) or run.log.run.startswith(name)]
        if len(found) == 1:
            return found[0]
        titles = ", ".join(run.log.title for run in runs)
        if not runs:
            waits = [one.name for one in self.waiting.cells]
            raise RingError(f"no run is in progress{f'; cell {waits[0]} has not begun' if waits else ''}")
        raise RingError(f"no run {name!r} is in progress: {titles}" if not found else f"name one of the runs: {titles}")

    def _in_progress(self) -> list[Run]:
        return self.cluster.runs.in_progress if self.cluster is not None else []

    def stop(self, ended: str = "") -> str:
        """Stop the cluster, if there is one, and cancel its batch job; ``ended`` says why it has ended already."""
        self._job_ended = ended
        back = "" if ended and self.cluster is None else self._cancelled()
        back += " Cells run in this notebook again." if self.default else ""
        followed = self._job.leave()
        cluster, self.cluster = self.cluster, None
        self.default = False
        if followed is None:
            return self._stopped(cluster, back)
        stopped = self._stopped(cluster, "") if cluster is not None else ""
        cancelled = "" if ended else f" Cancelled {followed.job.name}."
        return f"{stopped}{cancelled}{followed.close()}{back}".strip()

    def _stopped(self, cluster: Cluster | None, back: str) -> str:
        if cluster is None:
            return f"There is no cluster.{back}"
        dead = _dead(cluster)
        cluster.stop()
        if cluster.foreign:
            return f"Left the cluster of {_engines(cluster)}; the notebook that has started it keeps it.{back}"
        stopped = [rank for rank in range(cluster.n) if rank not in dead]
        if not stopped:
            return f"All {_engines(cluster)} had died already.{back}"
        if dead:
            return f"Stopped {plural(len(stopped), 'engine')}; {rank_text(dead)} had died already.{back}"
        return f"Stopped {_engines(cluster)}.{back}"

    def _cancelled(self) -> str:
        """Cancel all cells that wait, because the variables of the ranks go; says so."""
        cancelled = self.waiting.cancel()
        return f" Cancelled {plural(len(cancelled), 'cell')} of the queue." if cancelled else ""

    def restart(self, n: int | None = None, rerun: bool = False, ranks: Sequence[int] | None = None) -> str:
        """Restart the cluster, with ``n`` engines if given; with ``rerun`` run the set-up cells again, in order.

        With ``ranks`` end just these engines, whatever they do, and `heal` them.
        """
        cluster = self.require()
        if ranks is not None:
            with self.waiting.held():
                cluster.end(ranks)
                return self.heal(ranks)
        cancelled = self._cancelled()
        with ElapsedLine("Restarting the engines:"):
            cluster.restart(n)
        text = f"Restarted {_engines(cluster)} in {cluster.seconds_to_start:.1f} s; all variables of ranks are lost."
        text += cancelled
        if not rerun:
            return text
        cells = set_up_cells(self.setup)
        for cell in cells:
            self.train(cell.source, CellOptions.of(cell.options))
        return f"{text} Ran {plural(len(cells), 'set-up cell')} again."

    def snapshot(self, name: str) -> str:
        """Keep the variables of all ranks, and which cells are set-up cells; in a run behind its present step.

        Raises as `Cluster.snapshot`, and when several runs are in progress.
        """
        if runs := self._in_progress():
            if len(runs) > 1:
                raise RingError(f"{plural(len(runs), 'run')} are in progress; keep one with `RUN.snapshot({name!r})`")
            runs[0].snapshot(name)
            return f"Run {runs[0].log.title} keeps its variables at its next step, and says so."
        return snapshots.described(self.require().snapshot(name, set_up_cells(self.setup)))

    def restore(self, name: str, n: int | None = None, rerun: bool = False) -> str:
        """Bring a snapshot back, in this cluster or a new one, of ``n`` ranks where that is given.

        With ``rerun`` run its set-up cells first. Raises as `Cluster.restore`, and while a run is in progress.
        """
        found = snapshots.find(name)
        if runs := self._in_progress():
            raise RingError(
                f"run {runs[0].log.title} is in progress, and a restore replaces all variables; `%ring interrupt` first"
            )
        if self.cluster is None and self._job.followed is None:
            print(self.start(n or found.size, sync=self._syncs))  # noqa: T201
        elif n not in (None, self.require().n):
            print(self.restart(n))  # noqa: T201
        with self.waiting.held():
            self.setup = snapshots.set_up_cells(found)
            for cell in self.setup if rerun else ():
                options = CellOptions.of(cell.options)
                self.train(cell.source, replace(options, n=None, ranks=None, setup=False), first=True)
            return self.require().restore(name)

    def branch(
        self,
        name: str,
        n: int | None = None,
        called: str = "",
        background: bool = False,
        give: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """Restore the snapshot of a run, and run its cell from where it was, as a new run. ``give`` gets that.

        Raises as `restore`, and what the run raises.
        """
        found = snapshots.find(name)
        run, place = found.about.get("run"), found.about["ranks"][0]["place"]
        if not run:
            raise RingError(f"{name} was made between runs: `%ring restore {name}`, then run a cell")
        print(self.restore(name, n))  # noqa: T201
        if functions := place.pop("functions"):
            print(  # noqa: T201
                f"{', '.join(functions)}() begins anew: variables of functions are not kept; those of the cell are."
            )
        of = {**place, "of": f"{run['name']}@{found.step}"}
        options = replace(CellOptions.of(run["options"]), name=called, branch=of, resume=False, setup=False, ranks=None)
        self.train(run["source"], replace(options, n=None, background=background), give=give)

    def heal(self, ranks: Sequence[int] | None = None) -> str:
        """Start the ranks again that have died, or ``ranks``, and run the set-up cells on these alone.

        Raises what `Cluster.heal` raises, and what a set-up cell does.
        """
        return self._start_ranks(lambda cluster: cluster.heal(ranks), "again ") or "No rank has died."

    def grow(self, n: int, hosts: str = "") -> str:
        """Start engines until there are ``n``, and run the set-up cells on them alone. Raises as `heal`."""
        return self._start_ranks(lambda cluster: cluster.grow(n, hosts))

    def _start_ranks(self, start: Callable[[Cluster], list[int]], again: str = "") -> str:
        """Have ``start`` start ranks, and run the set-up cells on these; returns how many, or nothing for no ranks."""
        cluster = self.require()
        with self.waiting.held():  # until the set-up cells have run
            began = time.monotonic()
            started = start(cluster)
            if not started:
                return ""
            print(  # noqa: T201
                f"Started {rank_text(started)} {again}in {time.monotonic() - began:.1f} s, without variables; "
                "the others keep theirs."
            )
            ran = 0
            for cell in set_up_cells(self.setup):
                chosen = cell.options.get("ranks") or range(cell.options.get("n") or cluster.n)
                if only := [rank for rank in started if rank in chosen]:
                    try:
                        self.train(cell.source, CellOptions.of(cell.options), only)
                    except RingError:
                        print(f"{rank_text(only)}: a set-up cell failed; run it on all ranks if it communicates.")  # noqa: T201
                        raise
                    ran += 1
            return f"Ran {plural(ran, 'set-up cell')} on {rank_text(started)}." if ran else "There are no set-up cells."

    def shrink(self, n: int) -> str:
        """End all engines but the first ``n``."""
        cluster = self.require()
        with self.waiting.held():
            ended = cluster.shrink(n)
        return f"Ended {rank_text(ended)}; the other {_engines(cluster)} keep their variables."

    def require(self) -> Cluster:
        """The cluster. Raises ClusterError when there is none."""
        if self.cluster is None:
            if self._job.followed is not None:
                raise ClusterError(f"the engines have not started yet: {self._job.followed.line}")
            raise ClusterError(self._job_ended or "there is no cluster; `%ring start` starts one")
        return self.cluster

    def train(
        self,
        cell: str,
        options: CellOptions,
        only: Sequence[int] = (),
        give: Callable[[Any], None] = lambda _: None,
        first: bool = False,
    ) -> None:
        """Run a cell on ranks 0..n-1, or on ``ranks``, and show it; starts a cluster where there is none.

        While another run uses one of its ranks the cell waits in the queue, or ``first`` before it. With ``only`` just
        these engines execute it, of those that it is for, before all cells that wait.
        With ``setup`` `restart` can run it again; when a cell with the same ``cell_id`` was edited, its last version.
        Returns when the run has ended, with ``background`` at once. ``give`` gets the run as soon as there is one, and
        before it the cell that waits in the background. Raises what `Cluster.run` and `Run.wait` raise.
        """
        check_syntax(cell, options.first_line)
        if self.cluster is None and self._job.followed is None:
            print(self.start(options.n, sync=self._syncs))  # noqa: T201
        to_come = self._job.to_come  # whose engines will run the cell
        ranks = frozenset((to_come or self.require()).chosen(options.n, options.ranks))
        queued = QueuedCell(options.name or spoken_name(runs_directory()), ranks, first=first or bool(only))
        try:
            self.waiting.enter(queued)
            if queued.behind and (options.background or to_come is not None):
                give(queued)
                self._wait_in_background(queued, cell, options, give)
                return
            with ElapsedLine(lambda: f"Waiting for {queued.behind}:") if queued.behind else contextlib.nullcontext():
                run = self.waiting.begin(queued, lambda: self._send(cell, options, queued, only), self._answer)
        except KeyboardInterrupt as error:
            self.waiting.leave(queued)
            if queued.run is None:
                text = f"stopped waiting for {queued.behind}; this cell has not run" if queued.behind else "interrupted"
                raise brief(error, f"KeyboardInterrupt: {text}") from None
            run = queued.run
            run.interrupt()
        give(run)
        if queued.despite:
            print(queued.despite)  # noqa: T201
        background = options.background
        try:
            run.show(options.plot, live_after=0.0 if background else _LIVE_AFTER, apart=not background)
        except KeyboardInterrupt:  # nobody waits for the run yet, so nobody else would stop it
            run.interrupt()
            background = False
        if background:
            return
        try:
            run.wait()
        finally:
            run.show_displays()
            if run.ended_ranks:
                print(self.heal(run.ended_ranks))  # noqa: T201
            if options.timeline:
                with contextlib.suppress(FileNotFoundError):  # the cluster died before it sent one
                    display(run.timeline())

    def _send(self, cell: str, options: CellOptions, queued: QueuedCell, only: Sequence[int]) -> Run:
        """Send a cell whose turn has come."""
        cluster = self.require()
        # While other ranks execute a run, theirs would change under it.
        if self._syncs and not cluster.runs.in_progress and (synced := cluster.sync()).changed:
            print(synced)  # noqa: T201
        run = self.run = cluster.run(
            cell,
            n=options.n,
            ranks=options.ranks,
            name=queued.name,
            timeout=options.timeout,
            first_line=options.first_line,
            options=options.kept(),
            only=only,
        )
        if options.setup:
            self.setup = [*set_up_cells(self.setup), run.log]
        return run

    def _answer(self) -> None:
        """Have the user answer what ranks ask while a cell waits for them: the notebook takes no other cell."""
        for run in self._in_progress():
            if run.asking:
                run.answer()

    def _wait_in_background(
        self,
        queued: QueuedCell,
        cell: str,
        options: CellOptions,
        give: Callable[[Any], None],
    ) -> None:
        """Show that a cell waits, where it will show its run, and run it from another thread when its turn has come."""
        tell = Note().tell
        places = [display({"text/plain": ""}, raw=True, display_id=True) for _ in range(2)]

        def waits() -> None:
            tell(f"Cell {queued.name} waits for {queued.behind}. `%ring queue cancel {queued.number}` cancels it.")

        def follow() -> None:
            try:
                send = partial(self._send, cell, options, queued, ())
                run = self.waiting.begin(queued, send, waits, keeps_place=self._will_have_ranks)
            except Exception as error:
                tell(f"{type(error).__name__}: {error}")
                return
            tell(queued.despite)
            give(run)
            run.show(options.plot, places=(places[0], places[1]))

        waits()
        Thread(target=follow, name=f"ring-queued-{queued.number}", daemon=True).start()

    def _will_have_ranks(self) -> bool:
        return self.cluster.running if self.cluster is not None else self._job.followed is not None

    def queue(self) -> Listing:
        """The cells that wait for their ranks, the next one first."""
        rows = [
            [str(one.number), one.name, rank_list(sorted(one.ranks)), ago(time.time() - one.since), one.behind]
            for one in self.waiting.cells
        ]
        return Listing(["cell", "name", "ranks", "since", "waits for"], rows, "" if rows else "No cell waits.")

    def cancel(self, numbers: Sequence[int] = ()) -> str:
        """Cancel cells that wait, by default all of them; returns which. Raises RingError for an unknown number."""
        return " ".join(f"Cancelled cell {one.name}." for one in self.waiting.cancel(numbers)) or "No cell waits."

    def scale(
        self,
        cell: str,
        sizes: Sequence[int],
        *,
        name: str = "",
        timeout: float = 0.0,
        repeat: int = 1,
        warmup: int = 1,
        kind: Kind = "",
        csv: str = "",
        predict: Sequence[int] = (),
        link: float | None = None,
        gpus_per_host: int | None = None,
    ) -> ScalingReport:
        """Run a cell at several numbers of ranks, one after the other, ``repeat`` times; compare throughput and time.

        The first ``warmup`` steps count for nothing. ``kind`` is what the user means to measure. ``csv`` names a file.
        Sizes to ``predict`` are those of hosts with ``gpus_per_host`` ranks and a ``link`` of so many bytes per second.
        """
        check_syntax(cell, first_line=2)
        if csv:
            open(csv, "a").close()  # before the runs, which may take hours
        if self.cluster is None:
            print(self.start(max(sizes), sync=self._syncs))  # noqa: T201
        for size in sizes:  # all of them, before the first one runs
            self.require().check_size(size)
        runs: list[Measured] = []
        for number in range(1, repeat + 1):  # every size in turn, so that all see what the machine does meanwhile
            for size in sorted(set(sizes)):
                title = f"{name or 'scale'} {size}{f' #{number}' if repeat > 1 else ''}"
                one_rank = runs[0].rate if runs and runs[0].ranks == 1 else 0.0
                options = CellOptions(size, name=title, timeout=timeout, one_rank=one_rank, warmup=warmup)
                given: list[Run] = []
                self.train(cell, options, give=given.append)
                log = given[0].log
                runs.append(measured_run(log, warmup))
                if not runs[-1].rate and log.view().samples_per_s:
                    raise RingError(f"{title}: the cell logged too few steps after --warmup {warmup}; let it make more")
        points, notes = compare(runs, kind, predict, link, gpus_per_host)
        if not any(one.energy.joules for one in runs) and (why := energy_text(runs[-1].energy)):
            notes = [*notes, f"{why[:1].upper()}{why[1:]}."]
        if csv:
            write_csv(points, csv)
        return ScalingReport(points, "\n".join(notes))

    def export(self, path: str, name: str = "", job: str = "", nodes: int | None = None, **asked: Any) -> str:
        """Write the cell of the last run, or of the one whose name begins with ``name``, as a script for ``ringrun``.

        With ``job``, a site, also write a script beside it that runs it in a batch job. Raises RingError when there is
        no such run, ``path`` or that is a file that was not exported, and for a job that makes no sense.
        """
        record = self._named(name)
        if not job:
            if nodes or any(asked.values()):
                raise RingError("-N, --gpus, --time, --queue and --account belong to --job SITE")
            return str(export(record, path))
        return export_with_job(record, path, job, nodes, **asked)

    def submit(self, site: str, name: str = "", n: int | None = None, nodes: int | None = None, **asked: Any) -> str:
        """Run the cell of the last run, or of the one called ``name``, as a batch job; returns which.

        Raises RingError when there is no such run, and ClusterError when the batch system rejects the job.
        """
        record = self._named(name)
        request = request_of(site, hosts=nodes, n=n, ran_with=record.size, **asked)
        return submit(request, [*set_up_before(record), record])

    def _named(self, name: str) -> RunRecord:
        """The run that begins with ``name``, by default the last one. Raises RingError when there is none."""
        if name:
            return find(name)
        if self.run is None:
            raise RingError("no cell has run in this notebook; name a run, `%ring runs` lists them")
        return self.run.log

    def watch_classroom(self, sources: Sequence[str]) -> None:
        """Draw the runs that others share in the current cell; without ``sources``, end that. See `Classroom`."""
        before, self._classroom = self._classroom, None
        if before is not None:
            before.close()
        if sources:
            self._classroom = Classroom(sources)

    def status(self) -> Listing:
        """A table of the engines and what each is doing."""
        columns = ["rank", "host", "pid", "device", "state", "memory"]
        if self._job.to_come is not None:
            return Listing(columns, [], self._job.to_come.line)
        cluster = self.require()
        rows = [
            [
                str(one.rank),
                one.host,
                str(one.pid),
                one.device,
                f"in run {one.run}" if one.run else one.state,
                "" if one.memory is None else f"{one.memory / (1 << 20):,.0f} MiB",
            ]
            for one in cluster.status()
        ]
        left = walltime().left
        until = "" if left is None else f"\n{job_name()} reaches its time limit in {duration(left)}"
        return Listing(columns, rows, f"{_engines(cluster)}: {_described(cluster)}{until}")

    def status_json(self) -> str:
        """The cluster, the newest run and all ranks as JSON; docs/clusters.md describes it."""
        cluster = self.require()
        run = self.run
        about = {
            "engines": cluster.n,
            "why": cluster.why,
            "walltime_left": walltime().left,
            "ranks": [asdict(one) for one in cluster.status()],
            "run": None if run is None else {"id": run.log.run, "name": run.log.name, "status": run.status},
        }
        return json.dumps(about)

    def debug(self, rank: int | None = None, commands: Sequence[str] = ()) -> None:
        """pdb on a rank of the last run, in the frame that raised; by default on the rank that failed first.

        Answers ``commands``, or without them those that the user types until ``q``. Raises RingError when no rank has
        failed, and ClusterError when ``rank`` has left no exception.
        """
        cluster = self.require()
        log = self.run.log if self.run is not None else None
        if rank is None:
            failed = primary(log.failures()) if log is not None else []
            if not failed:
                raise RingError("no rank has failed in the last cell; `%ring debug -t RANK` looks at a certain one")
            rank = failed[0].rank
        ranks = log.environment.get("ranks") if log is not None else None
        debug_rank(cluster, ranks[rank] if ranks and rank < len(ranks) else rank, f"rank {rank}", commands)

    def stacks(self) -> str:
        """Where every rank is now, equal places once."""
        found = self.require().stacks()
        logs = [run.log for run in (*self._in_progress(), self.run) if run is not None]
        return render(found, {log.run: (log.source, log.options.get("first_line", 1)) for log in logs})

    def trace(self, name: str = "") -> Timeline:
        """The last operations of all ranks, of the run in progress, of the last one, or of the one called ``name``.

        Raises RingError where none are kept: those of a run that ended well.
        """
        try:
            if name:
                return Timeline(find(name).directory)
            if self.run is None:
                raise RingError("no cell has run in this notebook; name a run, `%ring runs` lists them")
            return self.run.timeline()
        except FileNotFoundError as error:
            raise RingError(f"{error}. Only runs that fail or are interrupted leave their last operations") from None

    def pull(self, names: Sequence[str], rank: int) -> tuple[dict[str, Any], Listing]:
        """Variables of ``rank`` by name, and a table that describes them on every rank."""
        cluster = self.require()
        values = {name: cluster.pull(name, rank) for name in names}
        rows = []
        for name in names:
            kinds = [kinds.get(name, "missing") for kinds in cluster.variables(name)]
            rows += [[name, str(index), kind] for index, kind in enumerate(kinds)]
        return values, Listing(["name", "rank", "value"], rows, f"pulled from rank {rank}")

    def names(self, path: str = "") -> list[str]:
        """The names on rank 0 (after ``path`` and a dot, where given); while a run is in progress, the last known."""
        if self.cluster is not None and self.cluster.running and (self.run is None or self.run.done):
            with contextlib.suppress(ClusterError):
                self._names[path] = self.cluster.names(path)
        return self._names.get(path, [])

    def help(self, path: str) -> str:
        """Signature and documentation of a name on rank 0, also while a run is in progress; empty where it has none."""
        if self.cluster is not None and self.cluster.running:
            with contextlib.suppress(ClusterError):
                return self.cluster.help(path)
        return ""


def _engines(cluster: Cluster) -> str:
    return plural(cluster.n, "engine")


def _dead(cluster: Cluster) -> list[int]:
    """The ranks of a cluster that have died."""
    if cluster.death is not None or who_ended_it():  # which ends them one after another
        return list(range(cluster.n))
    try:
        return sorted(set(range(cluster.n)).difference(cluster.living))
    except ClusterError:  # it has not started
        return []


def _described(cluster: Cluster) -> str:
    """Why there are so many engines, and with how many threads each computes."""
    fewest, most = min(cluster.threads), max(cluster.threads)
    if not most:
        return cluster.why
    each = plural(most, "thread") if fewest == most else f"{fewest} to {most} threads"
    return f"{cluster.why}; {each} each"


def debug_rank(cluster: Cluster, engine: int, name: str, commands: Sequence[str]) -> None:
    """Let the user debug the exception on ``engine``, which is called ``name``, until pdb ends.

    With ``commands`` these are carried out and nothing is asked. Raises ClusterError when the engine has no exception,
    RingError when the front end cannot ask.
    """
    text, goes_on = cluster.debug(engine)
    print(f"{name}:\n{text}", end="")  # noqa: T201
    given = iter(commands)
    while goes_on:
        if commands:
            command = next(given, "")
            if not command:
                return
        else:
            try:
                command = input(f"{name} (Pdb) ") or "where"
            except EOFError:
                return
            except StdinNotImplementedError:
                raise RingError(
                    "this front end cannot ask for commands; give them: `%ring debug -c 'p x' -c where`"
                ) from None
        text, goes_on = cluster.debug(engine, command)
        print(text, end="")  # noqa: T201
