"""allreduce in all its forms: one tensor or a group, synchronous or not, in place or not, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_notebook.core.communicator import ReduceOp, Work
from ring_notebook.torch.compression import Compression, Compressor
from ring_notebook.torch.handles import Handle, check_name
from ring_notebook.torch.process_sets import ProcessSet, global_process_set
from ring_notebook.torch.tensors import buffer_of, check_tensor, copy_back, on_host

__all__ = [
    "Reduction",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "reduction",
]


class Reduction(NamedTuple):
    """What an allreduce or reducescatter does besides moving data."""

    op: ReduceOp
    prescale: float
    postscale: float
    process_set: ProcessSet


def reduction(
    average: bool | None, op: int | None, prescale: float, postscale: float, process_set: ProcessSet
) -> Reduction:
    """The reduction that Horovod's arguments ask for: ``op`` is Average unless ``average`` or ``op`` says otherwise."""
    if average is not None:
        if op is not None:
            raise ValueError("average and op cannot both be given; op takes the place of average")
        op = ReduceOp.AVERAGE if average else ReduceOp.SUM
    elif op is None:
        op = ReduceOp.AVERAGE
    elif not isinstance(op, ReduceOp):
        try:
            op = ReduceOp(op)
        except ValueError:
            names = ", ".join(known.name.capitalize() for known in ReduceOp)
            raise ValueError(f"op={op!r} is not a reduction; use one of {names}") from None
    return Reduction(op, prescale, postscale, process_set)


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
    for tensor in tensors:
        check_tensor(tensor, "allreduce")
    communicator = how.process_set.communicator
    label = check_name(communicator, name) if claim else name or ""
    outputs = list(tensors) if in_place else [torch.empty_like(tensor) for tensor in tensors]
    sources = [on_host(tensor) for tensor in tensors]
    targets = sources if in_place else [on_host(output) for output in outputs]
    works: list[Work] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        inputs = [buffer_of(source) for source in sources if source.dtype is dtype]
        works.append(
            communicator.allreduce(
                inputs,
                inputs if in_place else [buffer_of(target) for target in targets if target.dtype is dtype],
                op=how.op,
                prescale=how.prescale,
                postscale=how.postscale,
                name=label,
                blocking=blocking,
            )
        )

    def finish() -> list[Tensor]:
        for target, output in zip(targets, outputs, strict=True):
            copy_back(target, output)
        return outputs

    return Handle(communicator, label if claim else "", works, finish)


def _differentiable(tensors: Sequence[Tensor], how: Reduction, name: str | None) -> list[Tensor]:
    if torch.is_grad_enabled() and any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
        return list(_Allreduce.apply(how, name, *tensors))  # type: ignore[no-untyped-call]
    result: list[Tensor] = start(tensors, how, name, in_place=False, blocking=True).wait()
    return result


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: Reduction, name: str | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.how = how
        return tuple(start(tensors, how, name, in_place=False, blocking=True).wait())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.how.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise RuntimeError(
                f"an allreduce with op={ctx.how.op.name.capitalize()} has no gradient; use Average or Sum, or detach "
                "the tensor"
            )
        return (None, None, *_differentiable(grads, ctx.how, None))


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """A new tensor: ``tensor`` reduced over all ranks, which give the same shape and dtype.

    ``op`` is Average (default), Sum, Min, Max, Product or Adasum; ``average=False`` is Horovod's old way to say Sum.
    The factors scale before and after: integers in float64 and truncated, float16 and bfloat16 in float32. The
    average of integers truncates. Differentiable for Average and Sum: the gradient is reduced in the same way.
    Raises CollectiveMismatch on every rank when the ranks disagree.
    """
    how = reduction(average, op, prescale_factor, postscale_factor, process_set)
    wire, ctx = compression.compress(tensor)
    return compression.decompress(_differentiable([wire], how, name)[0], ctx)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce` into a new tensor, which `synchronize` returns. Leave ``tensor`` alone until then."""
    how = reduction(average, op, prescale_factor, postscale_factor, process_set)
    return start([tensor], how, name, in_place=False).only()


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`allreduce` in place; returns ``tensor``."""
    how = reduction(average, op, prescale_factor, postscale_factor, process_set)
    start([tensor], how, name, blocking=True).wait()
    return tensor


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce` in place; `synchronize` returns ``tensor``."""
    how = reduction(average, op, prescale_factor, postscale_factor, process_set)
    return start([tensor], how, name).only()


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """New tensors: each of ``tensors`` reduced as by `allreduce`, all of them (per dtype) in one fused operation."""
    how = reduction(average, op, prescale_factor, postscale_factor, process_set)
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _differentiable([wire for wire, _ in pairs], how, name)
    return [compression.decompress(wire, ctx) for wire, (_, ctx) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allreduce` into new tensors; `synchronize` returns their list."""
    how = reduction(average, op, prescale_factor, postscale_factor, process_set)
    return start(tensors, how, name, in_place=False)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`grouped_allreduce` in place; returns ``tensors`` as a list."""
    how = reduction(average, op, prescale_factor, postscale_factor, process_set)
    result: list[Tensor] = start(tensors, how, name, blocking=True).wait()
    return result


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allreduce` in place; `synchronize` returns ``tensors`` as a list."""
    how = reduction(average, op, prescale_factor, postscale_factor, process_set)
    return start(tensors, how, name)
