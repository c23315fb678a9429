"""Programs that a framework's runtime executes in the background, and their place among this rank's collectives.

The call of such a program returns at once; its collectives follow in threads of the runtime. The script's next
collective must come after them, as on ranks that have waited for the program's result.
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
    """Wait a last time, before the exit handlers of the runtime end it."""
    settle()
    _waits.clear()
