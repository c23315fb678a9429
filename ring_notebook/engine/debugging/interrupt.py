"""SIGINT during a run: it ends the cell, and never the report of how the cell ended."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType

__all__ = ["Interruptible"]


class Interruptible:
    """While the block runs, SIGINT raises KeyboardInterrupt in what `call` calls and nowhere else.

    A signal before the call is raised in it; a signal after it is ignored.
    """

    def __init__(self) -> None:
        self._armed = False
        self._pending = False

    def __enter__(self) -> Interruptible:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def call(self, body: Callable[[], None]) -> BaseException | None:
        """Call ``body`` and return what it raised."""
        try:
            try:
                self._armed = True
                if self._pending:
                    raise KeyboardInterrupt
                body()
            finally:
                self._armed = False
        except BaseException as error:
            # Again: another signal may have arrived just before the line above.
            self._armed = False
            return error
        return None

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        if self._armed:
            raise KeyboardInterrupt
        self._pending = True
