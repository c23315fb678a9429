"""The cells of a notebook whose engines run in a batch job: the job may start again, and they with it."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ring_notebook.errors import ClusterError, RingError
from ring_notebook.launch.batch_job import walltime
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.magics.output_lines import Note
from ring_notebook.notebook.record.choices import CellOptions
from ring_notebook.notebook.run.catalogue import resumes_from
from ring_notebook.notebook.run.export import set_up_cells
from ring_notebook.notebook.run.notices import show_in_lab
from ring_notebook.notebook.run.run import Run

if TYPE_CHECKING:
    from ring_notebook.notebook.magics.session import Session

_SECONDS_TO_REQUEUE = 120.0  # from the end of a run to the news that its job is in the queue again


class BatchCells:
    """What a `Session` does as its batch job begins, is put back into the queue, begins again, and ends.

    ``started``: engines run in the job already. Those that start later take their place.
    """

    def __init__(self, session: Session, started: bool) -> None:
        self.tell = Note().tell
        """Shows a sentence on the job in place of the last one."""
        self._session = session
        self._started = started
        self._lost_run: Run | None = None

    def use(self, cluster: Cluster | None) -> None:
        """Run cells on ``cluster`` from now on; on None wait for another: the engines are lost."""
        session = self._session
        if cluster is None:
            session.cluster, self._lost_run = None, self._just_lost()
            return
        walltime().warn = lambda text: show_in_lab(text, "warning")
        with session.waiting.held() if self._started else contextlib.nullcontext():
            session.cluster = cluster
            if self._started:
                self._rerun()
        self._started = True

    def release(self, line: str) -> None:
        """Stop the cluster, because of what ``line`` tells."""
        try:
            self.tell(f"{line} {self._session.stop(line)}".strip())
        except Exception as error:
            self.tell(f"{line} {error}")

    def _just_lost(self) -> Run | None:
        """The run that the loss of the engines has ended; None where none was in progress."""
        run = self._session.run
        if run is None or not isinstance(run.error, ClusterError):
            return None
        ended = run.log.started + run.log.summary.get("seconds", 0.0)
        return run if time.time() - ended < _SECONDS_TO_REQUEUE else None

    def _rerun(self) -> None:
        """The job has started again: run the set-up cells, then the cell that its loss has ended."""
        print("The job has started again; all variables of ranks are lost.")  # noqa: T201
        run, self._lost_run = self._lost_run, None
        try:
            for cell in set_up_cells(self._session.setup):
                self._session.train(cell.source, CellOptions.of(cell.options), first=True)
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
        self._session.train(run.log.source, options, first=True)
