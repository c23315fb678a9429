"""What a reduction does to the values of the ranks, and how an allreduce begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ring_notebook.core.buffers import Buffer
from ring_notebook.core.communicator import ReduceOp, Work
from ring_notebook.torch.collectives.arguments import check_process_set, check_scale
from ring_notebook.torch.collectives.handles import Handle, check_name
from ring_notebook.torch.process_sets import ProcessSet
from ring_notebook.torch.tensors import buffer_in_place, buffer_of, check_tensor, copy_back, on_host

__all__ = ["Reduction", "operation_of", "reduce_now", "reduction_of", "start"]


class Reduction(NamedTuple):
    """What an allreduce or reducescatter does besides moving data."""

    op: ReduceOp
    prescale: float
    postscale: float
    process_set: ProcessSet


def operation_of(average: bool | None, op: int | None) -> ReduceOp:
    """The operation that Horovod's arguments ask for: Average unless ``average`` or ``op`` says otherwise."""
    if average is not None:
        if op is not None:
            raise ValueError("average and op cannot both be given; op takes the place of average")
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is None:
        return ReduceOp.AVERAGE
    if isinstance(op, ReduceOp):
        return op
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(known.name.capitalize() for known in ReduceOp)
        raise ValueError(f"op={op!r} is not a reduction; use one of {names}") from None


def reduction_of(
    average: bool | None, op: int | None, prescale: float, postscale: float, process_set: ProcessSet
) -> Reduction:
    """The reduction that Horovod's arguments ask for."""
    check_process_set(process_set)
    factors = check_scale(prescale, "prescale_factor"), check_scale(postscale, "postscale_factor")
    return Reduction(operation_of(average, op), *factors, process_set)


def start(
    tensors: Sequence[Tensor],
    how: Reduction,
    name: str | None,
    *,
    in_place: bool = True,
    blocking: bool = False,
    claim: bool = True,
) -> Handle:
    """Begin one allreduce per dtype of ``tensors``; `Handle.wait` gives the list of reduced tensors.

    ``claim`` keeps others from using the name meanwhile.
    """
    sources = [_buffer(tensor) for tensor in tensors]
    communicator = how.process_set.communicator
    label = check_name(communicator, name) if claim else name or ""
    outputs = list(tensors) if in_place else [torch.empty_like(tensor) for tensor in tensors]
    targets = sources if in_place else [_buffer(output) for output in outputs]
    works: list[Work] = []
    for dtype in dict.fromkeys(source.dtype for source in sources):
        works.append(
            communicator.allreduce(
                [source for source in sources if source.dtype is dtype],
                [target for target in targets if target.dtype is dtype],
                op=how.op,
                prescale=how.prescale,
                postscale=how.postscale,
                name=label,
                blocking=blocking,
            )
        )

    def finish() -> list[Tensor]:
        for target, output in zip(targets, outputs, strict=True):
            copy_back(target.owner, output)
        return outputs

    return Handle(communicator, label if claim else "", works, finish)


def _buffer(tensor: Tensor) -> Buffer:
    """Buffer over ``tensor``, or over a copy of it (its ``owner``) where the core cannot work on it in place."""
    buffer = buffer_in_place(tensor)
    if buffer is None:
        check_tensor(tensor, "allreduce")
        buffer = buffer_of(on_host(tensor))
    return buffer


def reduce_now(
    tensor: Tensor,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    name: str | None,
    *,
    in_place: bool,
) -> Tensor:
    """`start` and `Handle.wait` for one tensor, which is reduced in less time than a handle takes where it is small."""
    check_process_set(process_set)
    if type(prescale) is not float or type(postscale) is not float:
        prescale, postscale = check_scale(prescale, "prescale_factor"), check_scale(postscale, "postscale_factor")
    source = buffer_in_place(tensor)
    if source is None:
        how = Reduction(op, prescale, postscale, process_set)
        reduced: list[Tensor] = start([tensor], how, name, in_place=in_place, blocking=True).wait()
        return reduced[0]
    communicator = process_set.communicator
    output = tensor if in_place else torch.empty_like(tensor)
    communicator.allreduce_now(
        source,
        source if in_place else buffer_of(output),
        op,
        prescale,
        postscale,
        check_name(communicator, name) if name else "",
    )
    return output
