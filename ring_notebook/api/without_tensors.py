"""barrier and join: the operations that take no tensors."""

from __future__ import annotations

from ring_notebook.api.arguments import check_process_set
from ring_notebook.api.process_sets import ProcessSet, global_process_set

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
    full size). An allgather, a broadcast or the step of a fused optimizer raises CollectiveMismatch on the ranks that
    call it; this rank stays joined. ``device`` is accepted for Horovod's sake and ignored.
    """
    global _joins
    work = global_process_set.communicator.join()
    work.wait()
    _joins += 1
    return work.last_rank()


def joins() -> int:
    """How often all ranks have joined: ranks that had joined know nothing of what the others agreed on meanwhile."""
    return _joins
