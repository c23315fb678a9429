"""reducescatter in all its forms: one tensor or a group, synchronous or not, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ring_notebook.api.arguments import Reduction, check_scatterable, reduction_of
from ring_notebook.api.handles import Handle, check_name, member_name, together
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.core.partition import row_split
from ring_notebook.core.work import Call
from ring_notebook.torch.collectives.allgather import allgather
from ring_notebook.torch.collectives.tensor_arguments import check_compression, check_tensors
from ring_notebook.torch.compression import Compression, Compressor
from ring_notebook.torch.tensors import buffer_of, check_tensor, copy_back, for_core, ordered


def _start(tensor: Tensor, how: Reduction, name: str | None, *, blocking: bool, call: Call | None = None) -> Handle:
    check_tensor(tensor, "reducescatter")
    communicator = how.process_set.communicator
    check_scatterable(tensor.shape, how.op, communicator.rank)
    name = check_name(communicator, name)
    rows = row_split(tensor.shape[0], communicator.size)[communicator.rank]
    output = tensor.new_empty(rows, *tensor.shape[1:])
    source, target = for_core(tensor), for_core(output)
    work = communicator.reducescatter(
        buffer_of(source),
        buffer_of(target),
        op=how.op,
        prescale=how.prescale,
        postscale=how.postscale,
        name=name,
        blocking=blocking,
        call=call,
    )

    def finish() -> Tensor:
        copy_back(target, output)
        return output

    return Handle(communicator, name, [ordered(work, source)], finish)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, how: Reduction, name: str | None) -> Tensor:
        ctx.how = how
        result: Tensor = _start(tensor, how, name, blocking=True).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        how: Reduction = ctx.how
        if how.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise RuntimeError(
                f"a reducescatter with op={how.op.name.capitalize()} has no gradient; use Average or Sum, or detach "
                "the tensor"
            )
        # Horovod's rule: with it allgather(reducescatter(x)) has the gradient of allreduce(x).
        scale = how.prescale * how.postscale * (how.process_set.size() if how.op is ReduceOp.SUM else 1)
        return allgather(grads[0] * scale, process_set=how.process_set), None, None


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the reduction of ``tensor`` over all ranks (Horovod: ``reducescatter``).

    All ranks give the same shape and dtype, else all raise CollectiveMismatch.

    Of ``d0`` rows each rank gets ``d0 // size``, the first ``d0 % size`` ranks one more. Scaling and rounding are as in
    `allreduce`. Differentiable for Average and Sum: the ranks' gradients are gathered, times size for Sum (as in
    Horovod, so that ``allgather(reducescatter(x))`` has the gradient of ``allreduce(x)``).
    """
    how = reduction_of(None, op, prescale_factor, postscale_factor, process_set)
    check_compression(compression)
    wire, ctx = compression.compress(tensor)
    if torch.is_grad_enabled() and isinstance(wire, Tensor) and wire.requires_grad:
        result: Tensor = _Reducescatter.apply(wire, how, name)  # type: ignore[no-untyped-call]
    else:
        result = _start(wire, how, name, blocking=True).wait()
    reduced: Tensor = compression.decompress(result, ctx)
    return reduced


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `reducescatter`; `synchronize` returns this rank's rows. Do not change ``tensor`` until then."""
    how = reduction_of(None, op, prescale_factor, postscale_factor, process_set)
    return _start(tensor, how, name, blocking=False)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of each of ``tensors``, as a list."""
    check_tensors(tensors, "grouped_reducescatter")
    return [
        reducescatter(tensor, member_name(name, index), compression, op, process_set, prescale_factor, postscale_factor)
        for index, tensor in enumerate(tensors)
    ]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `grouped_reducescatter`; `synchronize` returns the list."""
    check_tensors(tensors, "grouped_reducescatter")
    how = reduction_of(None, op, prescale_factor, postscale_factor, process_set)
    call = Call(len(tensors))
    return together(
        [
            _start(tensor, how, member_name(name, index), blocking=False, call=call)
            for index, tensor in enumerate(tensors)
        ]
    )
