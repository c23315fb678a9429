"""The batch job in which a notebook's engines run: followed, warned of its end, and its cells run again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from ring_notebook.errors import ClusterError, RingError
from ring_notebook.files.snapshot_files import kept_text
from ring_notebook.launch.own_batch_job import walltime
from ring_notebook.notebook.cluster.batch import BatchCluster, BatchJob
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.note import Note
from ring_notebook.notebook.run.catalogue import resumes_from
from ring_notebook.notebook.run.export import set_up_cells
from ring_notebook.notebook.run.notifications import show_in_lab
from ring_notebook.notebook.run.run import Run
from ring_notebook.notebook.session.run_cell import run_cell
from ring_notebook.notebook.session.session import Session
from ring_notebook.protocol.ringtrain_options import CellOptions

_SECONDS_TO_REQUEUE = 120.0  # from the end of a run to the news that its job is in the queue again


def require_no_job(session: Session) -> None:
    """Raise ClusterError when there is a job."""
    if session.job is not None:
        raise ClusterError(f"{session.job.line} `%ring stop` gives it up")


def follow_job(session: Session, job: BatchJob, cluster: Cluster | None, release: Callable[[str], str]) -> None:
    """Follow a job, in which ``cluster`` runs if there is one; its state is shown in the current cell.

    The session gets the cluster, and loses it with the engines. ``release`` gives the cluster up for a reason.
    """
    note = Note()
    lost: Run | None = None  # the run that the loss of the engines has ended
    again = cluster is not None  # whether engines that start now replace others

    def use(cluster: Cluster | None) -> None:
        nonlocal again, lost
        if cluster is None:
            session.cluster = None
            lost = _lost(session.run)
            return
        warn_before_walltime(session)
        with session.waiting.held() if again else contextlib.nullcontext():
            session.cluster = cluster
            if again:
                before, lost = lost, None
                _run_again(session, before)
        again = True

    def give_up(line: str) -> None:
        try:
            note.tell(f"{line} {release(line)}".strip())
        except Exception as error:
            note.tell(f"{line} {error}")

    session.job = BatchCluster(
        job,
        use=use,
        tell=note.tell,
        busy=lambda: bool(session.in_progress or session.waiting.cells),
        release=give_up,
        keep=lambda name: save_before_end(session, name),
        **job.times,
    )
    note.tell(session.job.line)
    session.job.begin(cluster)


def warn_before_walltime(session: Session) -> None:
    """When the job that this kernel runs in ends soon, say so and keep the variables."""
    walltime().warn = lambda text: show_in_lab(f"{text}. {save_before_end(session, 'walltime')}", "warning")


def save_before_end(session: Session, name: str) -> str:
    """Keep the variables before the engines end: of runs in progress as ``RUN@STEP``, else under ``name``.

    Returns what to tell the user.
    """
    runs = session.in_progress
    try:
        for run in runs:
            run.snapshot()
        if runs:
            return "Its runs keep their variables at their next steps."
        return kept_text(session.require().snapshot(name, set_up_cells(session.setup))).split("\n")[0]
    except RingError as error:
        return f"No snapshot: {error}."


def _lost(run: Run | None) -> Run | None:
    """The last run, if the loss of the engines has just ended it."""
    if run is None or not isinstance(run.error, ClusterError):
        return None
    ended = run.log.started + run.log.summary.get("seconds", 0.0)
    return run if time.time() - ended < _SECONDS_TO_REQUEUE else None


def _run_again(session: Session, lost: Run | None) -> None:
    """Run the set-up cells, then the cell that was ``lost``, before those that wait."""
    session.tell("The job has started again; all variables of ranks are lost.")
    try:
        for cell in set_up_cells(session.setup):
            run_cell(session, cell.source, CellOptions.of(cell.options), first=True)
    except Exception as error:  # the job stays: the user runs the cell again
        session.tell(f"A set-up cell failed: {type(error).__name__}: {error}")
        return
    if lost is None:
        return
    try:
        resumes_from(lost.log.name, "")
    except RingError:
        session.tell(f"Run {lost.log.title} had written no checkpoint (`ring.checkpoint`): run its cell again.")
        return
    options = replace(CellOptions.of(lost.log.options), name=lost.log.name, background=True, resume=True)
    run_cell(session, lost.log.source, options, first=True)
