"""Checks of arguments that no framework is needed for: each raises before anything is sent."""

from __future__ import annotations

from operator import index
from typing import Any

from ring_notebook.api.process_sets import ProcessSet

__all__ = ["check_integer", "check_passes", "check_process_set", "check_scale"]


def check_process_set(value: Any) -> None:
    """Raise TypeError unless ``value`` is a process set."""
    if not isinstance(value, ProcessSet):
        raise TypeError(
            f"process_set must be a ProcessSet, as add_process_set([0, 2]) returns it, got {type(value).__name__}"
        )


def check_integer(value: Any, name: str) -> int:
    """``value`` as an int. Raises TypeError for anything but an integer."""
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def check_scale(value: Any, name: str) -> float:
    """``value`` as a factor. Raises TypeError for anything but a number."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def check_passes(value: int) -> int:
    """``value`` as the number of backward passes in a step. Raises TypeError for no integer, ValueError below 1."""
    if check_integer(value, "backward_passes_per_step") < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {value}")
    return value
