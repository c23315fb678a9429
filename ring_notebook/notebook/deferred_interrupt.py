"""Holds an interrupt of this process back during work that must not stop halfway."""

from __future__ import annotations

import signal
from threading import current_thread, main_thread
from types import FrameType, TracebackType


class DeferredInterrupt:
    """In the block SIGINT raises nothing; ``came`` then says whether it came.

    It does nothing outside of the main thread, which alone gets signals, and where SIGINT is ignored.
    """

    def __init__(self) -> None:
        self.came = False

    def __enter__(self) -> DeferredInterrupt:
        before = signal.getsignal(signal.SIGINT)
        self._before = before if callable(before) and current_thread() is main_thread() else None
        if self._before is not None:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, _signum: int, _frame: FrameType | None) -> None:
        self.came = True
