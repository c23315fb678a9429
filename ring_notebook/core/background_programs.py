"""Programs that the runtime of a framework executes in the background, and their place among this rank's collectives.

Such a program has begun when its call returns, and its collectives follow in threads of that runtime. What the script
calls next must come after them, as on the other ranks, which may have waited for the result.
"""

from __future__ import annotations

from collections.abc import Callable

from ring_notebook.rank.exit_watch import at_exit

_waits: list[Callable[[], None]] = []


def wait_with(wait: Callable[[], None]) -> None:
    """From now on `settle` calls ``wait``, which returns when all programs of a runtime have ended."""
    if not _waits:
        at_exit(_end)
    _waits.append(wait)


def settle() -> None:
    """Return when all programs in the background have made their collectives."""
    for wait in _waits:
        wait()


def _end() -> None:
    """Wait a last time: after the exit handlers of a runtime there is nothing to wait for."""
    settle()
    _waits.clear()
