"""barrier: returns when all ranks have called it."""

from __future__ import annotations

from ring_notebook.api.arguments import check_process_set
from ring_notebook.api.process_sets import ProcessSet, global_process_set

__all__ = ["barrier"]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks of ``process_set`` have called it (Horovod: ``barrier``).

    Raises CollectiveAborted when a rank failed or left, CollectiveTimeout after ``RING_TIMEOUT`` seconds.
    """
    check_process_set(process_set)
    process_set.communicator.barrier().wait()
