"""Checks of arguments that several functions take: what is wrong is said before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from ring_notebook.torch.compression import Compression
from ring_notebook.torch.process_sets import ProcessSet
from ring_notebook.torch.tensors import check_tensor

__all__ = [
    "check_compression",
    "check_module",
    "check_optimizer",
    "check_passes",
    "check_process_set",
    "check_scale",
    "check_tensors",
    "check_whole",
]


def check_process_set(value: Any) -> None:
    """Raise TypeError unless ``value`` is a process set."""
    if not isinstance(value, ProcessSet):
        raise TypeError(
            f"process_set takes a ProcessSet, as add_process_set([0, 2]) returns it, got {type(value).__name__}"
        )


def check_compression(value: Any) -> None:
    """Raise TypeError unless ``value`` can compress and decompress."""
    if value is not Compression.none and not (hasattr(value, "compress") and hasattr(value, "decompress")):
        raise TypeError(
            "compression takes Compression.none, .fp16 or .bf16, or a class of your own with compress and decompress, "
            f"got {value!r}"
        )


def check_tensors(value: Any, operation: str) -> None:
    """Raise TypeError unless ``value`` is a list of tensors that the core can send."""
    if isinstance(value, Tensor) or not isinstance(value, Sequence):
        raise TypeError(f"{operation} takes a list of tensors, got a {type(value).__name__}")
    for tensor in value:
        check_tensor(tensor, operation)


def check_optimizer(value: Any, function: str) -> None:
    """Raise TypeError unless ``value`` is an optimizer."""
    if not isinstance(value, torch.optim.Optimizer):
        raise TypeError(f"{function} takes a torch.optim.Optimizer, got {type(value).__name__}")


def check_module(value: Any, function: str) -> None:
    """Raise TypeError unless ``value`` is a model."""
    if not isinstance(value, torch.nn.Module):
        raise TypeError(f"{function} takes a torch.nn.Module, got {type(value).__name__}")


def check_whole(value: Any, name: str) -> int:
    """``value`` as an int. Raises TypeError for anything that is no whole number."""
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: takes a whole number") from None


def check_scale(value: Any, name: str) -> float:
    """``value`` as a factor. Raises TypeError for anything that is no number."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}={value!r}: takes a number")
    return float(value)


def check_passes(value: int) -> int:
    """``value`` as a number of backward passes in a step. Raises TypeError for no whole number, ValueError below 1."""
    if check_whole(value, "backward_passes_per_step") < 1:
        raise ValueError(f"backward_passes_per_step={value}: must be at least 1")
    return value
