"""join: a rank without more data contributes zeros to the others' allreduces until all have joined."""

from __future__ import annotations

from ring_notebook.api.process_sets import global_process_set

__all__ = ["join", "joins"]

_joins = 0


def join(device: int = -1) -> int:
    """Say that this rank has no more data; wait for the others and return the rank that joined last (on all ranks).

    Until all have joined, this rank contributes zeros to the others' allreduces (their Average still divides by the
    full size); an allgather, a broadcast or the step of a fused optimizer raises on all ranks. ``device`` is Horovod's
    and has no use here.
    """
    global _joins
    work = global_process_set.communicator.join()
    work.wait()
    _joins += 1
    return work.last_rank()


def joins() -> int:
    """How often all ranks have joined: what some of them agreed on before, the others may not have heard."""
    return _joins
