"""Streams that copy memory in the background, one thread each; implements `Driver`."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["LateCopies"]


class LateCopies:
    """A stream is a thread that executes what is queued on it; an event is the end of what was queued before it."""

    def __init__(self) -> None:
        self._streams: dict[int, ThreadPoolExecutor] = {}
        self._events: dict[int, Future[None]] = {}

    def stream(self) -> int:
        number = len(self._streams) + 1
        self._streams[number] = ThreadPoolExecutor(1, f"stream-{number}")
        return number

    def event(self) -> int:
        number = len(self._events) + 1
        self._events[number] = Future()
        self._events[number].set_result(None)
        return number

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._queue(stream, lambda: ctypes.memmove(target, source, nbytes))

    def record(self, event: int, stream: int) -> None:
        self._events[event] = self._queue(stream, lambda: None)

    def wait(self, stream: int, event: int) -> None:
        self._queue(stream, self._events[event].result)

    def done(self, event: int) -> bool:
        return self._events[event].done()

    def synchronize(self, stream: int) -> None:
        self._queue(stream, lambda: None).result()

    def hold(self, stream: int) -> Callable[[], None]:
        released = threading.Event()
        self._queue(stream, released.wait)
        return released.set

    def _queue(self, stream: int, work: Callable[[], object]) -> Future[None]:
        return self._streams[stream].submit(work)  # type: ignore[arg-type]
