"""allreduce in all its forms: one tensor or a group, synchronous or not, in place or not, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ring_notebook.api.arguments import Reduction, operation_of, reduction_of
from ring_notebook.api.handles import Handle, Waitable
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.torch.collectives.start_allreduce import (
    reduce_now,
    start,
    start_in_place,
)
from ring_notebook.torch.collectives.tensor_arguments import check_compression, check_tensors, checked_list
from ring_notebook.torch.compression import Compression, Compressor
from ring_notebook.torch.tensors import check_tensor


def _differentiable(tensors: Sequence[Tensor], how: Reduction, name: str | None) -> list[Tensor]:
    if torch.is_grad_enabled() and any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
        return list(_Allreduce.apply(how, name, *tensors))  # type: ignore[no-untyped-call]
    if len(tensors) == 1 and isinstance(tensors[0], Tensor):
        return [reduce_now(tensors[0], *how, name, False)]
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
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """A new tensor: ``tensor`` reduced over all ranks, which give the same shape and dtype (Horovod: ``allreduce``).

    ``op`` is Average (default), Sum, Min, Max, Product or Adasum; ``average=False`` is Horovod's old way to say Sum.
    The factors scale before and after: integers in float64 and truncated, float16 and bfloat16 in float32. The
    average of integers truncates. Differentiable for Average and Sum: the gradient is reduced in the same way.
    Raises CollectiveMismatch on every rank when the ranks disagree.
    """
    how = reduction_of(average, op, prescale_factor, postscale_factor, process_set)
    check_compression(compression)
    wire, ctx = compression.compress(tensor)
    return compression.decompress(_differentiable([wire], how, name)[0], ctx)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce` into a new tensor, which `synchronize` returns. Leave ``tensor`` alone until then."""
    how = reduction_of(average, op, prescale_factor, postscale_factor, process_set)
    return start([tensor], how, name, in_place=False).only()


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`allreduce` in place; returns ``tensor``."""
    if not isinstance(tensor, Tensor):
        check_tensor(tensor, "allreduce")
    how = op if type(op) is ReduceOp and average is None else operation_of(average, op)
    reduced: Tensor = reduce_now(tensor, how, prescale_factor, postscale_factor, process_set, name)
    return reduced


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Waitable:
    """Start `allreduce` in place; `synchronize` returns ``tensor``."""
    if not isinstance(tensor, Tensor):
        check_tensor(tensor, "allreduce")
    how = op if type(op) is ReduceOp and average is None else operation_of(average, op)
    return start_in_place(tensor, how, prescale_factor, postscale_factor, process_set, name)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """New tensors: each of ``tensors`` reduced as by `allreduce`, all of them (per dtype) in one fused operation."""
    how = reduction_of(average, op, prescale_factor, postscale_factor, process_set)
    check_tensors(tensors, "grouped_allreduce")
    check_compression(compression)
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _differentiable([wire for wire, _ in pairs], how, name)
    return [compression.decompress(wire, ctx) for wire, (_, ctx) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allreduce` into new tensors; `synchronize` returns their list."""
    how = reduction_of(average, op, prescale_factor, postscale_factor, process_set)
    check_tensors(tensors, "grouped_allreduce")
    return start(tensors, how, name, in_place=False)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`grouped_allreduce` in place; returns ``tensors`` as a list."""
    how = op if type(op) is ReduceOp and average is None else operation_of(average, op)
    given = checked_list(tensors, "grouped_allreduce")
    reduced: list[Tensor] = reduce_now(given, how, prescale_factor, postscale_factor, process_set, name)
    return reduced


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Waitable:
    """Start `grouped_allreduce` in place; `synchronize` returns ``tensors`` as a list."""
    how = op if type(op) is ReduceOp and average is None else operation_of(average, op)
    given = checked_list(tensors, "grouped_allreduce")
    return start_in_place(given, how, prescale_factor, postscale_factor, process_set, name)
