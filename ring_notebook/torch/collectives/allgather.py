"""allgather in all its forms: one tensor or a group, synchronous or not, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ring_notebook.api.arguments import check_process_set
from ring_notebook.api.handles import Handle, check_name, member_name, together
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.core.work import Call
from ring_notebook.torch.collectives.allreduce import allreduce
from ring_notebook.torch.collectives.tensor_arguments import check_output, check_tensors
from ring_notebook.torch.tensors import (
    buffer_of,
    check_tensor,
    equal_parts,
    for_core,
    from_bytes,
    ordered,
    received,
)


def _start(
    tensor: Tensor,
    name: str | None,
    process_set: ProcessSet,
    *,
    blocking: bool,
    output: Tensor | None = None,
    call: Call | None = None,
) -> Handle:
    """Start an allgather; `Handle.wait` returns the tensor and the number of rows from each rank."""
    check_tensor(tensor, "allgather")
    check_process_set(process_set)
    communicator = process_set.communicator
    name = check_name(communicator, name)
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    row = tensor.shape[1:]
    # Rows without elements have no bytes: gather their number instead.
    sent = for_core(tensor) if prod(row) else torch.tensor([tensor.shape[0]], device="cpu")
    places = equal_parts(output, communicator.size, tensor.dtype) if output is not None and sent.is_cpu else []
    started = communicator.allgather(buffer_of(sent), places, name=name, blocking=blocking, call=call)
    work = ordered(started, sent)

    def finish() -> tuple[Tensor, list[int]]:
        if output is not None and started.placed():
            return output, [count // prod(row) for count in work.counts()]
        if not prod(row):
            rows = from_bytes(started.output(), torch.int64, [communicator.size]).tolist()
            return tensor.new_empty(sum(rows), *row) if output is None else output, rows
        rows = [count // prod(row) for count in work.counts()]
        result = received(work, tensor, [sum(rows), *row])
        if output is None:
            return result, rows
        check_output(output, result.numel(), tensor.dtype, communicator.ranks[communicator.rank], "allgather")
        return output.copy_(result.view(output.shape)), rows

    return Handle(communicator, name, [work], finish)


def gathered(
    tensor: Tensor, name: str | None, process_set: ProcessSet, output: Tensor | None = None
) -> tuple[Tensor, list[int]]:
    """`allgather` without gradient, with the number of rows from each rank."""
    result: tuple[Tensor, list[int]] = _start(tensor, name, process_set, blocking=True, output=output).wait()
    return result


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Start `allgather`; `synchronize` returns the concatenation. Do not change ``tensor`` until then."""
    return _start(tensor, name, process_set, blocking=False).only()


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        whole, rows = gathered(tensor, name, process_set)
        ctx.process_set, ctx.shape = process_set, tensor.shape
        ctx.start = sum(rows[: process_set.rank()])
        ctx.rows = rows[process_set.rank()]
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Horovod's rule: all ranks compute one loss, so their gradients of this rank's rows are averaged.
        reduced = allreduce(grads[0], op=ReduceOp.AVERAGE, process_set=ctx.process_set)
        return reduced.narrow(0, ctx.start, ctx.rows).reshape(ctx.shape), None, None


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The tensors of all ranks, concatenated along the first dimension in rank order (Horovod: ``allgather``).

    Returns a new tensor on the device of ``tensor``. The first dimension may differ by rank, the others and the dtype
    may not; a tensor without dimensions counts as one row. Differentiable: each rank gets the average of all ranks'
    gradients of its own rows (as in Horovod). Raises CollectiveMismatch on every rank when the ranks disagree.
    """
    if torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad:
        result: Tensor = _Allgather.apply(tensor, name, process_set)  # type: ignore[no-untyped-call]
        return result
    return gathered(tensor, name, process_set)[0]


def allgather_into(
    output: Tensor, tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """`allgather` into ``output``, which it returns; without gradient. Beyond Horovod.

    Data is received without a copy where ``output`` is contiguous, in CPU memory, and all ranks send the same size.
    This rank's own part may already be in its place. Raises ValueError where ``output`` has another size or dtype.
    """
    return gathered(tensor.detach(), name, process_set, output)[0]


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `grouped_allgather`; `synchronize` returns the list."""
    check_tensors(tensors, "grouped_allgather")
    call = Call(len(tensors))
    return together(
        [
            _start(tensor, member_name(name, index), process_set, blocking=False, call=call).only()
            for index, tensor in enumerate(tensors)
        ]
    )


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of each of ``tensors``, as a list."""
    check_tensors(tensors, "grouped_allgather")
    return [allgather(tensor, member_name(name, index), process_set) for index, tensor in enumerate(tensors)]
