"""The moments between two steps of a training, at which its state can be kept: before the next batch.

A change that all ranks take at the end of a step comes inside ``optimizer.step()``. What the loop does behind that,
such as a step of a schedule or of another optimizer, belongs to the same batch, so a snapshot waits for the next one.
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
    """A pass over batches, which calls `between_steps` before each one."""
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
    """Tell that what follows the last step has been done; between turns of logical ranks it has not."""
    freed_memory.give_back_if_little_is_left()
    while _waiting and not _held:
        _waiting.pop(0)()


def is_held() -> bool:
    """Whether logical ranks take turns: a step is made in the last one."""
    return _held


def hold(is_held: bool) -> None:
    """Ignore `between_steps` from now on, or no more."""
    global _held
    _held = is_held


def forget() -> None:
    """The cell has ended: nothing waits any more, and no pass is in progress."""
    global _passes, _held
    _waiting.clear()
    _passes = 0
    _held = False
