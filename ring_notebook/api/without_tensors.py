"""barrier and join: the operations that take no tensors."""

from __future__ import annotations

from ring_notebook.api.arguments import check_process_set
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.errors import CollectiveMismatch

__all__ = ["barrier", "join", "joins"]

_joins = 0


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks of ``process_set`` have called it (Horovod: ``barrier``).

    Raises CollectiveAborted when a rank failed or left, CollectiveTimeout after ``RING_TIMEOUT`` seconds.
    """
    check_process_set(process_set)
    process_set.communicator.barrier().wait()


def join(device: int = -1) -> int:
    """Wait until all ranks have no more data; returns the rank that joined last, on all ranks (Horovod: ``join``).

    Until all have joined, this rank contributes zeros to the others' allreduces (their Average still divides by the
    full size). An allgather, a broadcast or the step of a fused optimizer raises CollectiveMismatch on all ranks: on
    those that have joined when all have, so that the others may call further operations until then. ``device`` is
    accepted for Horovod's sake and ignored.
    """
    global _joins
    mismatch: CollectiveMismatch | None = None
    while True:
        try:
            work = global_process_set.communicator.join()
            work.wait()
            break
        except CollectiveMismatch as error:
            # The others may have started operations behind the one that failed. Only a rank that has joined is in step
            # with all of them.
            mismatch = mismatch or error
    _joins += 1
    if mismatch is None:
        work.check_names()
    if mismatch is not None:
        raise mismatch
    return work.last_rank()


def joins() -> int:
    """How often all ranks have joined: ranks that had joined know nothing of what the others agreed on meanwhile."""
    return _joins
