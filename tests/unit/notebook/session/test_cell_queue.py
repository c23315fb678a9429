"""What a cell of the queue says of itself, before its turn and after it has left the queue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ring_notebook.errors import ClusterError
from ring_notebook.notebook.lab.handle import Handle
from ring_notebook.notebook.session.cell_queue import CellQueue, QueuedCell


def state(cell: QueuedCell) -> tuple[str, str]:
    """What its variable shows, and the status of its handle in a laboratory."""
    shown = repr(cell).removeprefix("<cell next on ranks 0-1: ").removesuffix(">")
    return shown, Handle(cast("Any", None), "next", queued=cell).status


def in_queue(busy: str = "") -> tuple[CellQueue, QueuedCell]:
    queue, cell = CellQueue(list, lambda: busy), QueuedCell("next", frozenset({0, 1}))
    queue.enter(cell)
    return queue, cell


def nothing() -> None:
    pass


def test_a_cell_that_was_cancelled_says_so() -> None:
    queue, cell = in_queue("the batch job")
    assert state(cell) == ("waits for the batch job", "waiting")
    cell.cancel()
    with pytest.raises(Exception, match="cell next was cancelled"):
        queue.begin(cell, lambda: cast("Any", None), nothing)
    assert state(cell) == ("was cancelled before it began", "cancelled")


def test_a_cell_whose_waiting_was_interrupted_was_cancelled() -> None:
    queue, cell = in_queue("the batch job")

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        queue.begin(cell, lambda: cast("Any", None), interrupted)
    assert state(cell) == ("was cancelled before it began", "cancelled")


def test_a_cell_that_could_not_be_started_says_why() -> None:
    queue, cell = in_queue()

    def start() -> Any:
        cell.cancel()  # too late
        raise ClusterError("rank 1 has died;\n  `%ring heal` starts it again")

    with pytest.raises(ClusterError):
        queue.begin(cell, start, nothing)
    why = "could not begin: ClusterError: rank 1 has died; `%ring heal` starts it again"
    assert state(cell) == (why, "failed")


def test_a_cell_that_has_begun_names_its_run() -> None:
    queue, cell = in_queue()
    queue.begin(cell, lambda: cast("Any", SimpleNamespace(log=SimpleNamespace(title="lucky-garden"))), nothing)
    assert state(cell)[0] == "has begun as run lucky-garden"
