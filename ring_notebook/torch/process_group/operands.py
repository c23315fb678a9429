"""Tensors of torch.distributed as Buffers: flat, of any dtype, with the copy back that other layouts need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ring_notebook.core.buffers import Buffer
from ring_notebook.torch.tensors import buffer_in_place, buffer_of, can_reduce, moved_as

CopyBack = Callable[[], object] | None
Operand = tuple[Buffer, CopyBack]
"""Memory that an operation reads or writes, and a function that copies a result back to the tensor, if needed."""


def caller_waits(opts: Any) -> bool:
    """Whether the caller of an operation waits for it, by its options."""
    return opts is not None and not opts.asyncOp


def check_on_host(tensors: Sequence[Tensor], rank: int, operation: str) -> None:
    """Raise ValueError for tensors on a device and TypeError for sparse ones, with what to do instead."""
    for tensor in tensors:
        if not tensor.is_cpu:
            raise ValueError(
                f"rank {rank}: dist.{operation}: backend 'ring' moves tensors in CPU memory, got one on "
                f"{tensor.device}; use a group of backend 'nccl' for it: dist.new_group(backend='nccl')"
            )
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"rank {rank}: dist.{operation}: backend 'ring' takes dense tensors, got {tensor.layout}; "
                "call to_dense() first, or ring.sparse_allreduce_async"
            )


def nbytes(tensor: Tensor) -> int:
    """Size of a tensor's values in bytes."""
    return tensor.numel() * tensor.element_size()


def operand(tensor: Tensor) -> Operand:
    """The values of ``tensor`` as numbers, in one dimension. Raises TypeError for a dtype that the core lacks."""
    numbers = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor
    buffer = buffer_in_place(numbers)
    if buffer is not None and numbers.data_ptr() == tensor.data_ptr():
        return Buffer(buffer.address, (numbers.numel(),), buffer.dtype, tensor), None
    if not can_reduce(numbers.dtype):
        raise TypeError(f"backend 'ring' cannot reduce {tensor.dtype}; convert the tensor first")
    copy = numbers.detach().resolve_neg().contiguous().view(-1)
    if copy.data_ptr() == numbers.data_ptr():
        copy = copy.clone()
    return buffer_of(copy), lambda: _write(tensor, copy)


def count(tensor: Tensor) -> int:
    """The number of elements of a tensor in the core's dtype for moving it, see `moved_as`."""
    return nbytes(tensor) // moved_as(tensor.dtype).itemsize


def moved_operand(tensor: Tensor) -> Operand:
    """The values of ``tensor``, whatever its dtype, to be moved and not combined."""
    plain = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
    memory = (
        tensor if plain else tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    )
    buffer = Buffer(memory.data_ptr(), (count(memory),), moved_as(memory.dtype), memory)
    return buffer, None if plain else lambda: tensor.detach().copy_(memory)


def parts_in_place(targets: Sequence[Tensor], expected: Sequence[int]) -> list[Buffer]:
    """The places in ``targets`` for the ``expected`` elements from each rank; empty if the core cannot write there.

    There is one target for each rank, or one for all ranks.
    """
    if not targets or not all(
        target.is_contiguous() and not target.is_neg() and not target.is_conj() for target in targets
    ):
        return []
    if len(targets) == len(expected):
        starts = [target.data_ptr() for target in targets]
        owners = list(targets)
    elif len(targets) == 1:
        width = moved_as(targets[0].dtype).itemsize
        starts = [targets[0].data_ptr() + sum(expected[:part]) * width for part in range(len(expected))]
        owners = [targets[0]] * len(expected)
    else:
        return []
    return [
        Buffer(start, (size,), moved_as(owner.dtype), owner)
        for start, size, owner in zip(starts, expected, owners, strict=True)
    ]


def _write(tensor: Tensor, copy: Tensor) -> None:
    target = tensor.detach()
    target.copy_(torch.view_as_complex(copy.view(*tensor.shape, 2)) if tensor.is_complex() else copy.view(tensor.shape))
