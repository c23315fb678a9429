"""Tensors in ring memory, which all ranks of a host map: the fastest place to reduce."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ring_notebook.api.process_sets import global_process_set
from ring_notebook.core.communicator import Communicator
from ring_notebook.torch.tensors import from_bytes

__all__ = ["empty", "empty_in"]


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of ``size`` (as in `torch.empty`) in ring memory, not initialized; freed with its last view.

    ``dtype`` is torch's default when left out. Raises ValueError for a negative dimension, and OutOfRingMemoryError
    when the machine or its limit is full.
    """
    if any(isinstance(length, int) and length < 0 for length in size):
        raise ValueError(f"empty: dimensions must not be negative, got {size}")
    shape = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    return empty_in(global_process_set.communicator, torch.Size(shape), dtype or torch.get_default_dtype())  # type: ignore[arg-type]


def empty_in(communicator: Communicator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`empty` for the ranks of ``communicator``."""
    return from_bytes(memoryview(communicator.empty(prod(shape) * dtype.itemsize)), dtype, shape)
