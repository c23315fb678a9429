"""The kinds of device that ranks train on, by torch's names."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["accelerator", "has_streams", "register_device"]

_kinds = ["cuda"]


def register_device(name: str) -> None:
    """Make the devices of type ``name`` known; ``torch.NAME`` has the functions of ``torch.cuda``."""
    if name not in _kinds:
        _kinds.append(name)


def has_streams(tensor: Tensor) -> bool:
    """Whether the tensor's device works through streams that the host need not wait for."""
    return tensor.device.type in _kinds


def accelerator() -> str | None:
    """The type of device that this process trains on: the first that torch finds; None where it finds none."""
    return next((name for name in _kinds if hasattr(torch, name) and getattr(torch, name).is_available()), None)
