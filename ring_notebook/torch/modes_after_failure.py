"""Restores torch's modes, which an interrupted cell may leave changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_DEVICES = ("cpu", "cuda")
_inference: list[Any] = []  # keeps objects alive: inference mode ends with the object that has set it


class _Mode(NamedTuple):
    name: str
    read: Callable[[], Any]
    put: Callable[[Any], object]


def remember() -> Callable[[], list[str]]:
    """Remember the modes of this thread. Returns a function that restores those that have changed since.

    That function returns their names.
    """
    before = [mode.read() for mode in _MODES]

    def put_back() -> list[str]:
        names = []
        for mode, value in zip(_MODES, before, strict=True):
            if mode.read() != value:  # read only now, because restoring one mode may change the next
                mode.put(value)
                names.append(mode.name)
        return names

    return put_back


def _set_inference(enabled: bool) -> None:
    _inference.append(torch.inference_mode(enabled))
    _inference[-1].__enter__()


def _autocast() -> list[Any]:
    """The depth of nested autocast blocks, then for each kind of device whether it is on, and its dtype."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return [depth, *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES)]


def _set_autocast(value: list[Any]) -> None:
    depth, *kinds = value
    while torch.autocast_increment_nesting() - 1 > depth:
        torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()
    torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()  # as the end of the outermost block does
    for kind, (enabled, dtype) in zip(_DEVICES, kinds, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _device() -> torch.device | None:
    """The default device; None for the CPU."""
    known = torch.get_default_device()
    return None if known.type == "cpu" else known


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _anomaly_detection() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


_MODES = (
    _Mode("inference mode", torch.is_inference_mode_enabled, _set_inference),
    _Mode("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _Mode("autocast", _autocast, _set_autocast),
    _Mode("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Mode("the default device", _device, torch.set_default_device),
    _Mode(
        "deterministic mode",
        _deterministic,
        lambda mode: torch.use_deterministic_algorithms(mode[0], warn_only=mode[1]),
    ),
    _Mode("anomaly detection", _anomaly_detection, lambda mode: torch.set_anomaly_enabled(*mode)),
)
