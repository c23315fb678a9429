"""Which cells of a notebook run again when its batch job was put back into the queue and has started again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ring_notebook.errors import ClusterError, RingError
from ring_notebook.notebook.record.choices import CellOptions
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.run.catalogue import resumes_from
from ring_notebook.notebook.run.export import set_up_cells
from ring_notebook.notebook.run.run import Run

_SECONDS_TO_REQUEUE = 120.0  # from the end of a run to the news that its job is in the queue again


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
