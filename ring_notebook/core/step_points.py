"""The moments between two steps of a training, at which its state can be kept: before the next batch.

All ranks take changes inside ``optimizer.step()``. The loop may do more for the same batch afterwards, such as a step
of a schedule or of another optimizer, so a snapshot waits for the next batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ring_notebook.core import freed_memory

_waiting: list[Callable[[], object]] = []
_passes = 0
_held = False


@contextmanager
def in_pass() -> Iterator[None]:
    """A context for a pass over batches, which calls `between_steps` before each one."""
    global _passes
    _passes += 1
    try:
        yield
    finally:
        _passes = max(0, _passes - 1)  # a cell may have ended in between


def is_in_pass() -> bool:
    return _passes > 0


def at_next_batch(callback: Callable[[], object]) -> None:
    """Call ``callback`` once, before the next batch, at the latest at the end of the cell."""
    _waiting.append(callback)


def between_steps() -> None:
    """Call the waiting callbacks: the work for the last step is done, unless logical ranks are between turns."""
    freed_memory.give_back_if_little_is_left()
    while _waiting and not _held:
        _waiting.pop(0)()


def is_held() -> bool:
    """Whether a turn of a logical rank is in progress, so that `between_steps` calls nothing."""
    return _held


def hold(is_held: bool) -> None:
    """Whether `between_steps` is to call nothing from now on."""
    global _held
    _held = is_held


def forget() -> None:
    """At the end of a cell: drop waiting callbacks and passes in progress."""
    global _passes, _held
    _waiting.clear()
    _passes = 0
    _held = False
