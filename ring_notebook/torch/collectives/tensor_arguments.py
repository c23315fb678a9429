"""Checks of arguments that are tensors, models, optimizers or compressors, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ring_notebook.torch.compression import Compression
from ring_notebook.torch.tensors import check_tensor


def check_compression(value: Any) -> None:
    """Raise TypeError unless ``value`` has the methods compress and decompress."""
    if value is not Compression.none and not (hasattr(value, "compress") and hasattr(value, "decompress")):
        raise TypeError(
            "compression must be Compression.none, .fp16 or .bf16, for gradients also .int8, .auto or .powersgd(4), "
            f"or a class of your own with compress and decompress, got {value!r}"
        )


def check_tensors(value: Any, operation: str) -> None:
    """Raise TypeError unless ``value`` is a list of tensors that the core can send."""
    for tensor in checked_list(value, operation):
        check_tensor(tensor, operation)


def checked_list(value: Any, operation: str) -> list[Tensor]:
    """The items of ``value``, which must not be a single tensor; `check_tensor` checks those that are not plain."""
    if type(value) is not list and (isinstance(value, Tensor) or not isinstance(value, Sequence)):
        raise TypeError(f"{operation} takes a list of tensors, got a {type(value).__name__}")
    return list(value)


def check_optimizer(value: Any, function: str) -> None:
    """Raise TypeError unless ``value`` is an optimizer."""
    if not isinstance(value, torch.optim.Optimizer):
        raise TypeError(f"{function} takes a torch.optim.Optimizer, got {type(value).__name__}")


def check_module(value: Any, function: str) -> None:
    """Raise TypeError unless ``value`` is a model."""
    if not isinstance(value, torch.nn.Module):
        raise TypeError(f"{function} takes a torch.nn.Module, got {type(value).__name__}")


def check_output(output: Tensor, count: int, dtype: torch.dtype, rank: int, operation: str) -> None:
    """Raise ValueError unless ``output`` has exactly ``count`` elements of ``dtype``."""
    if output.numel() != count or output.dtype != dtype:
        raise ValueError(
            f"rank {rank}: {operation}: expected an output of {count} elements of {dtype}, got "
            f"{output.numel()} of {output.dtype}; give one of the expected size"
        )
