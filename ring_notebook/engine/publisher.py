"""The thread that ships a rank's records to the kernel, at most ten messages a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Thread
from types import TracebackType

from ring_notebook.records import Record, encode

__all__ = ["Publisher"]

PERIOD = 0.1
"""Seconds between two messages of a rank."""

STATUS_PERIOD = 1.0
"""Seconds between two statuses of a rank."""


class Publisher:
    """Ships what ``collect`` returns every PERIOD, with a status every STATUS_PERIOD.

    ``collect(status)`` returns the records that have come up, with a Status when it is asked for one.
    ``send`` takes one encoded message. As a context manager it starts and always joins its thread; what the
    thread raised is raised at the end of the block.
    """

    def __init__(self, collect: Callable[[bool], Sequence[Record]], send: Callable[[bytes], None]) -> None:
        self._collect = collect
        self._send = send
        self._stop = Event()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._work, name="ring-publisher", daemon=True)

    def __enter__(self) -> Publisher:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        tick = 0
        ticks_per_status = round(STATUS_PERIOD / PERIOD)
        try:
            while True:
                # The first says that the rank has begun, the second soon after where in the cell it is.
                records = self._collect(tick == 0 or tick % ticks_per_status == 2)
                if records:
                    self._send(encode(records))
                tick += 1
                if self._stop.wait(PERIOD):
                    break
        except BaseException as error:
            self._error = error
