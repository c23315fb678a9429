"""join: a rank without more data contributes zeros to the allreduces of the others until all have joined."""

from __future__ import annotations

from ring_notebook.api.process_sets import global_process_set

__all__ = ["join", "joins"]

_joins = 0


def join(device: int = -1) -> int:
    """Wait until all ranks have no more data; returns the rank that joined last, on all ranks (Horovod: ``join``).

    Until all have joined, this rank contributes zeros to the others' allreduces (their Average still divides by the
    full size); an allgather, a broadcast or the step of a fused optimizer raises CollectiveMismatch on all ranks.
    ``device`` is accepted for Horovod's sake and ignored.
    """
    global _joins
    work = global_process_set.communicator.join()
    work.wait()
    _joins += 1
    return work.last_rank()


def joins() -> int:
    """How often all ranks have joined: ranks that had joined know nothing of what the others agreed on meanwhile."""
    return _joins
