"""alltoall: every rank sends a slice of its tensor to every rank; synchronous or not, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ring_notebook.api.arguments import check_process_set, rows_to_send
from ring_notebook.api.handles import Handle, check_name
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.torch.tensors import buffer_of, check_tensor, for_core, from_bytes, ordered, received

Splits = Sequence[int] | Tensor | None


def _start(tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet, *, blocking: bool) -> Handle:
    """Start an alltoall; `Handle.wait` returns the tensor and the number of rows from each rank (int32)."""
    check_tensor(tensor, "alltoall")
    check_process_set(process_set)
    communicator = process_set.communicator
    send = rows_to_send(tensor.shape, splits, communicator.rank, communicator.size)
    name = check_name(communicator, name)
    row = tensor.shape[1:]
    # Rows without elements have no bytes: exchange their numbers instead.
    counts = torch.tensor(send, device="cpu")
    sent, shares = (for_core(tensor), send) if prod(row) else (counts, [1] * communicator.size)
    started = communicator.alltoall([buffer_of(sent)], shares, name=name, blocking=blocking)
    work = ordered(started, sent)

    def finish() -> tuple[Tensor, Tensor]:
        if prod(row):
            rows = [count // prod(row) for count in work.counts()]
            output = received(work, tensor, [sum(rows), *row])
        else:
            rows = from_bytes(started.output(), torch.int64, [communicator.size]).tolist()
            output = tensor.new_empty(sum(rows), *row)
        return output, torch.tensor(rows, dtype=torch.int32, device="cpu")

    return Handle(communicator, name, [work], finish)


def exchanged(tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet) -> tuple[Tensor, Tensor]:
    """`alltoall` without gradient, with the number of rows from each rank (int32)."""
    result: tuple[Tensor, Tensor] = _start(tensor, splits, name, process_set, blocking=True).wait()
    return result


def alltoall_async(
    tensor: Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `alltoall`; `synchronize` returns its result. Do not change ``tensor`` until then."""
    handle = _start(tensor, splits, name, process_set, blocking=False)
    return handle.only() if splits is None else handle


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        output, received = exchanged(tensor, splits, name, process_set)
        ctx.process_set, ctx.received = process_set, received
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, _ = alltoall(grads[0], ctx.received, process_set=ctx.process_set)
        return grad, None, None, None


def alltoall(
    tensor: Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send ``splits[r]`` rows of ``tensor`` to each rank r; returns the rows received, in rank order.

    Without ``splits`` every rank gets an equal share, and the result is the tensor alone; with them it is
    ``(tensor, received_splits)``, the latter int32. All dimensions except the first are the same on all ranks.
    Differentiable: gradients go back to the ranks that sent the rows. Raises ValueError on the rank whose ``splits``
    do not fit, CollectiveMismatch on every rank when other dimensions or dtypes differ. (Horovod: ``alltoall``.)
    """
    if torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad:
        result = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    else:
        result = _start(tensor, splits, name, process_set, blocking=True).wait()
    return result[0] if splits is None else result
