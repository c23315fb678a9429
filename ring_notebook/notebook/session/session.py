"""The state of one notebook: its cluster or the job that will hold one, its newest run, its set-up cells."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

from ring_notebook.errors import ClusterError, RingError
from ring_notebook.notebook.cluster.batch import BatchCluster
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.cluster.stacks import render
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.run.catalogue import find
from ring_notebook.notebook.run.classroom import Classroom
from ring_notebook.notebook.run.run import Run
from ring_notebook.notebook.run.sharing import Sharing
from ring_notebook.notebook.session.cell_queue import CellQueue

_SENT = 50  # runs, among which is the one that trained


class Session:
    """The state of one notebook: ``variables`` belong to its user, ``tell`` shows a line of text."""

    of_kernel: ClassVar[Session | None] = None
    """The session of this kernel's magics, once they are loaded."""

    def __init__(self, variables: dict[str, Any] | None = None, tell: Callable[[str], None] = print) -> None:
        self.variables = {} if variables is None else variables
        self.tell = tell
        self.cluster: Cluster | None = None
        self.run: Run | None = None
        """The newest run."""
        self.sent: deque[str] = deque(maxlen=_SENT)
        """The ids of the newest runs."""
        self.setup: list[RunRecord] = []
        """The runs of the set-up cells."""
        self.waiting = CellQueue(lambda: self.in_progress, lambda: self.to_come.job.name if self.to_come else "")
        """The cells that wait for ranks."""
        self.default = False
        """Whether cells without a magic run on the ranks."""
        self.syncs = False
        """Whether each cell first brings modules that have changed to the ranks."""
        self.job: BatchCluster | None = None
        """The batch job of the cluster, while there is one."""
        self.why_ended = ""
        """Why there is no cluster any more."""
        self.sharing = Sharing(lambda: self.run.log if self.run is not None else None)
        self.classroom: Classroom | None = None
        self.close_to_agents: Callable[[], None] | None = None
        """Closes the notebook to agents, while it is open to them."""
        self.known_names: dict[str, list[str]] = {}
        """The last known names on rank 0, by the path before them."""

    @property
    def in_progress(self) -> list[Run]:
        """The runs that have not ended, oldest first."""
        return self.cluster.runs.in_progress if self.cluster is not None else []

    @property
    def at_hand(self) -> list[Run]:
        """The runs in progress, then the newest one."""
        return [*self.in_progress, *filter(None, [self.run])]

    @property
    def to_come(self) -> BatchCluster | None:
        """The job whose engines have not started yet, or are lost for now."""
        return self.job if self.cluster is None else None

    def require(self) -> Cluster:
        """The cluster. Raises ClusterError when there is none."""
        if self.cluster is None:
            if self.job is not None:
                raise ClusterError(f"the engines have not started yet: {self.job.line}")
            raise ClusterError(self.why_ended or "there is no cluster; `%ring start` starts one")
        return self.cluster

    def stacks(self) -> str:
        """Where every rank is now, in the cell and in what it has called. Raises ClusterError without a cluster."""
        return render(self.require().stacks(), [run.log for run in self.at_hand])

    def record(self, name: str = "") -> RunRecord:
        """The run that begins with ``name``, by default the last one. Raises RingError when there is none."""
        if name:
            return find(name)
        if self.run is None:
            raise RingError("no cell has run in this notebook; name a run, `%ring runs` lists them")
        return self.run.log

    def trained(self, name: str = "") -> RunRecord:
        """The run that begins with ``name``, by default the last one that has logged, else the last one.

        Raises RingError when there is none.
        """
        last = self.record(name)
        for run in reversed(self.sent) if not name else ():
            with suppress(RingError):  # it was deleted
                record = last if run == last.run else find(run)
                if record.view().names:
                    return record
        return last

    def steered(self, name: str = "") -> Run:
        """The run in progress whose name or id begins with ``name``. Raises RingError unless it is exactly one."""
        runs = self.in_progress
        found = [run for run in runs if run.log.title.startswith(name) or run.log.run.startswith(name)]
        if len(found) == 1:
            return found[0]
        titles = ", ".join(run.log.title for run in runs)
        if not runs:
            waits = [one.name for one in self.waiting.cells]
            why = "one without --background blocks the notebook while it runs; change or stop it in its panel"
            raise RingError(f"no run is in progress: {f'cell {waits[0]} has not begun' if waits else why}")
        raise RingError(f"no run {name!r} is in progress: {titles}" if not found else f"name one of the runs: {titles}")
