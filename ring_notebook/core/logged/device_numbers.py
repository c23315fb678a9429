"""Numbers on their way from a device: copied in the background, read when they have arrived."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

_PAUSE = 0.001  # seconds


class DeviceNumber(Protocol):
    """A number that is being copied from a device."""

    def has_arrived(self) -> bool:
        """Whether `number` would not wait."""

    def number(self) -> float:
        """The number, once it has arrived."""


_copiers: list[Callable[[Any], DeviceNumber | None]] = []


def register_copier(copier: Callable[[Any], DeviceNumber | None]) -> None:
    """Have ``copier`` asked for every number on a device: it begins to copy those of its framework, None for others."""
    _copiers.append(copier)


def copy_from_device(value: Any) -> Any:
    """``value``, an array of one number on a device, as it is now: on its way, or as a copy on its device."""
    for copier in _copiers:
        if (number := copier(value)) is not None:
            return number
    return value.detach().clone()


def has_arrived(value: Any, deadline: float = 0.0) -> bool:
    """Whether `read` gives what the device had; ``deadline``, of the monotonic clock, is waited for first."""
    if type(value) is float or not hasattr(value, "has_arrived"):
        return True
    while not _arrived(value):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)
    return True


def _arrived(value: DeviceNumber) -> bool:
    try:
        return value.has_arrived()
    except RuntimeError:  # the device has failed; its next use says so
        return True


def read(value: Any) -> float:
    """The number; NaN for one that has not arrived, or that a device which has failed keeps."""
    if type(value) is float:
        return value
    if not hasattr(value, "has_arrived"):
        return float(value)
    try:
        return float(value.number()) if value.has_arrived() else math.nan
    except RuntimeError:
        return math.nan
