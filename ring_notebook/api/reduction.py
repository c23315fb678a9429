"""What a reduction does to the values of the ranks, from the arguments that Horovod's functions take."""

from __future__ import annotations

from typing import NamedTuple

from ring_notebook.api.arguments import check_process_set, check_scale
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ReduceOp

__all__ = ["Reduction", "operation_of", "reduction_of"]


class Reduction(NamedTuple):
    """What an allreduce or reducescatter does besides moving data."""

    op: ReduceOp
    prescale: float
    postscale: float
    process_set: ProcessSet


def operation_of(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """The operation that Horovod's arguments ask for: Average unless ``average`` or ``op`` says otherwise."""
    if average is not None:
        if op is not None:
            raise ValueError("give either average or op, not both; average is Horovod's old form of op")
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is None:
        return ReduceOp.AVERAGE
    if isinstance(op, ReduceOp):
        return op
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(known.name.capitalize() for known in ReduceOp)
        raise ValueError(f"op must be one of {names}, got {op!r}") from None


def reduction_of(
    average: bool | None, op: ReduceOp | None, prescale: float, postscale: float, process_set: ProcessSet
) -> Reduction:
    """The reduction that Horovod's arguments ask for."""
    if average is None and type(op) is ReduceOp and type(prescale) is type(postscale) is float:
        if process_set is not global_process_set:
            check_process_set(process_set)
        return Reduction(op, prescale, postscale, process_set)
    check_process_set(process_set)
    factors = check_scale(prescale, "prescale_factor"), check_scale(postscale, "postscale_factor")
    return Reduction(operation_of(average, op), *factors, process_set)
