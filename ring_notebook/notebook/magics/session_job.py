"""The batch job in which a notebook's engines run: submitted or found again, followed, and its cells run again."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ring_notebook.errors import ClusterError, RingError
from ring_notebook.launch.batch_job import walltime
from ring_notebook.launch.batch_systems import BatchError
from ring_notebook.launch.job_script import BatchRequest, batch_request
from ring_notebook.notebook.cluster.batch import HOLD, BatchCluster, BatchJob, join
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.magics.cell_queue import CellQueue
from ring_notebook.notebook.magics.live_lines import Note
from ring_notebook.notebook.record.choices import CellOptions
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.run.catalogue import resumes_from
from ring_notebook.notebook.run.export import Script, export, set_up_cells, write_job
from ring_notebook.notebook.run.run import Run
from ring_notebook.verdict import WALLTIME_WARNING

_SECONDS_TO_REQUEUE = 120.0  # from the end of a run to the news that its job is in the queue again


class Owner(Protocol):
    """The session of the notebook."""

    cluster: Cluster | None
    run: Run | None
    setup: list[RunRecord]
    waiting: CellQueue

    def train(self, cell: str, options: CellOptions, *, first: bool) -> None: ...
    def stop(self, ended: str = "") -> str: ...
    def attached(self, cluster: Cluster) -> str: ...
    def before_walltime(self, text: str) -> None: ...
    def keep_before_end(self, name: str) -> str: ...


class SessionJob:
    """The batch job of a session. It gives its owner the cluster, and takes it away when the engines are lost."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.followed: BatchCluster | None = None
        """The job, while there is one."""

    def submit(
        self,
        site: str,
        n: int | None,
        keep: bool,
        *,
        idle: float | None = None,
        signal: float | None = None,
        dry_run: bool = False,
        nodes: int | None = None,
        **asked: Any,
    ) -> str:
        """Submit a job of ``site`` and follow it; with ``dry_run`` only return its script.

        Raises ClusterError for a job that makes no sense or is rejected.
        """
        request = request_of(site, hosts=nodes, n=n, **asked)
        if dry_run:
            return request.script(HOLD, Path("output")).rstrip()
        self._follow(BatchJob.submit(request, keep, idle=idle or 0.0, before_end=signal or WALLTIME_WARNING), None)
        return ""

    def require_none(self) -> None:
        """Raise ClusterError when there is a job."""
        if self.followed is not None:
            raise ClusterError(f"{self.followed.line} `%ring stop` gives it up")

    def attach(self, job: BatchJob) -> str:
        """Follow a job that a kernel before this one has kept, and take the cluster in it."""
        state = job.state()
        cluster, text = None, ""
        if job.cluster and state is not None and state.phase == "runs":
            join(job, state)
            with contextlib.suppress(ClusterError):  # the engines have ended, as with the login node: others start
                cluster = Cluster.attach(job.cluster.split("-")[1])
                text = self._owner.attached(cluster)
        job.describe()
        self._follow(job, cluster)
        return text

    def leave(self) -> BatchCluster | None:
        """The job, which is not the session's any more."""
        followed, self.followed = self.followed, None
        return followed

    @property
    def to_come(self) -> BatchCluster | None:
        """The job whose engines have not started yet, or are lost for now."""
        return self.followed if self._owner.cluster is None else None

    def _follow(self, job: BatchJob, cluster: Cluster | None) -> None:
        """Follow a job, whose state is shown where this is called."""
        owner, note = self._owner, Note()
        cells = RequeuedCells(partial(owner.train, first=True))
        again = cluster is not None  # whether engines that start now take the place of others

        def use(cluster: Cluster | None) -> None:
            nonlocal again
            if cluster is None:
                owner.cluster = None
                cells.lose(owner.run)
                return
            walltime().warn = owner.before_walltime
            with owner.waiting.held() if again else contextlib.nullcontext():
                owner.cluster = cluster
                if again:
                    cells.rerun(owner.setup)
            again = True

        def busy() -> bool:
            return bool((owner.cluster is not None and owner.cluster.runs.in_progress) or owner.waiting.cells)

        def release(line: str) -> None:
            try:
                note.tell(f"{line} {owner.stop(line)}".strip())
            except Exception as error:
                note.tell(f"{line} {error}")

        followed = self.followed = BatchCluster(
            job, use=use, tell=note.tell, busy=busy, release=release, keep=owner.keep_before_end, **job.times
        )
        note.tell(followed.line)
        followed.begin(cluster)


def request_of(site: str, **asked: Any) -> BatchRequest:
    """A job of ``site``, as `batch_request`. Raises ClusterError for one that makes no sense."""
    try:
        return batch_request(site, **asked)
    except BatchError as error:
        raise ClusterError(str(error)) from None


def export_with_job(record: RunRecord, path: str, site: str, nodes: int | None, **asked: Any) -> str:
    """Write the cell of a run as a script, and one beside it that runs it in a batch job. Raises as `export`."""
    request = request_of(site, hosts=nodes, ran_with=record.size, **asked)
    file = Path(path).with_suffix(".sh")
    made: Script = export(record, path)
    ringrun = str(Path(sys.executable).with_name("ringrun"))  # a job need not have this environment's PATH
    command = [ringrun, "-np", str(request.n), sys.executable, str(Path(path))]
    return f"{made}\n{write_job(file, request.script(command, file.with_suffix('.out').absolute()))}"


class RequeuedCells:
    """Remembers the run that the loss of the engines has ended; ``train`` runs a cell before those that wait."""

    def __init__(self, train: Callable[[str, CellOptions], None]) -> None:
        self._train = train
        self._lost: Run | None = None

    def lose(self, run: Run | None) -> None:
        """The engines are lost, and have ended ``run``, the last one, unless it had ended before."""
        self._lost = None
        if run is not None and isinstance(run.error, ClusterError):
            ended = run.log.started + run.log.summary.get("seconds", 0.0)
            self._lost = run if time.time() - ended < _SECONDS_TO_REQUEUE else None

    def rerun(self, setup: Sequence[RunRecord]) -> None:
        """Run the set-up cells of ``setup``, then the cell that was lost."""
        print("The job has started again; all variables of ranks are lost.")  # noqa: T201
        run, self._lost = self._lost, None
        try:
            for cell in set_up_cells(setup):
                self._train(cell.source, CellOptions.of(cell.options))
        except Exception as error:  # the job stays: the user runs the cell again
            print(f"A set-up cell failed: {type(error).__name__}: {error}")  # noqa: T201
            return
        if run is None:
            return
        try:
            resumes_from(run.log.name, "")
        except RingError:
            print(f"Run {run.log.title} had written no checkpoint (`ring.checkpoint`): run its cell again.")  # noqa: T201
            return
        options = replace(CellOptions.of(run.log.options), name=run.log.name, background=True, resume=True)
        self._train(run.log.source, options)
