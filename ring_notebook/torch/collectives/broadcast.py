"""broadcast in all its forms: synchronous or not, in place or not, differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ring_notebook.api.arguments import check_process_set
from ring_notebook.api.handles import Handle, check_name
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.torch.collectives.allreduce import allreduce
from ring_notebook.torch.tensors import buffer_of, check_tensor, copy_back, for_core, moved_view, ordered


def _start(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool, blocking: bool
) -> Handle:
    check_process_set(process_set)
    is_complex = isinstance(tensor, Tensor) and tensor.is_complex()
    viewed = _viewed(tensor.detach().resolve_conj() if is_complex else tensor)
    check_tensor(viewed, "broadcast")
    output = tensor if in_place else torch.empty_like(tensor)
    communicator = process_set.communicator
    root = process_set.group_rank(root_rank)
    name = check_name(communicator, name)
    source = for_core(viewed)
    target = source if in_place else for_core(_viewed(output))
    work = communicator.broadcast(buffer_of(source), buffer_of(target), root, name=name, blocking=blocking)

    def finish() -> Tensor:
        copy_back(target, _viewed(output.detach()) if viewed is not tensor else output)
        return output

    return Handle(communicator, name, [ordered(work, source)], finish)


def _viewed(tensor: Any) -> Any:
    return moved_view(tensor) if isinstance(tensor, Tensor) else tensor


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `broadcast_`; `synchronize` returns ``tensor``, overwritten with the one of ``root_rank``.

    ``root_rank`` is a global rank, also within a process set. Raises ValueError when it is not a member.
    """
    return _start(tensor, root_rank, name, process_set, in_place=True, blocking=False)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite ``tensor`` with the one of ``root_rank`` (same shape and dtype on all ranks); returns ``tensor``."""
    result: Tensor = _start(tensor, root_rank, name, process_set, in_place=True, blocking=True).wait()
    return result


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a broadcast into a new tensor; ``tensor`` is not changed. `synchronize` returns the new one."""
    return _start(tensor, root_rank, name, process_set, in_place=False, blocking=False)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        result: Tensor = _start(tensor, root_rank, name, process_set, in_place=False, blocking=True).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Horovod's rule: all ranks compute one loss, so their gradients of the root's tensor are averaged.
        grad = allreduce(grads[0], op=ReduceOp.AVERAGE, process_set=ctx.process_set)
        is_root = ctx.process_set.group_rank(ctx.root_rank) == ctx.process_set.rank()
        return grad if is_root else torch.zeros_like(grad), None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """A new tensor with the values of ``root_rank``'s ``tensor`` (Horovod: ``broadcast``).

    ``root_rank`` is a global rank, also within a process set. All ranks give the same shape and dtype, else all raise
    CollectiveMismatch. Raises ValueError when the root is not a member of ``process_set``. Differentiable: the root
    gets the average of all ranks' gradients, the others zeros (as in Horovod).
    """
    if torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad:
        result: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
        return result
    result = _start(tensor, root_rank, name, process_set, in_place=False, blocking=True).wait()
    return result
