"""The points of a training at which all ranks have made the same steps: behind a step, and before the next batch."""

from __future__ import annotations

from collections.abc import Callable

_before_batch: list[Callable[[], object]] = []


def at_next_batch(callback: Callable[[], object]) -> None:
    """Call ``callback`` once, before this rank takes its next batch, or makes its next step."""
    _before_batch.append(callback)


def between_steps() -> None:
    """Tell that this rank is between two steps: what the last one was followed by is done."""
    while _before_batch:
        _before_batch.pop(0)()
