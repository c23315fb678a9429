"""The thread that ships a rank's records to the kernel, at most five messages a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from ring_notebook.records import Record, encode

__all__ = ["Publisher"]

PERIOD = 0.2
"""Seconds between two messages of a rank."""

STATUS_PERIOD = 1.0
"""Seconds between two statuses of a rank."""


# One thread for all runs: for every thread that has published, ipykernel keeps a socket open.
_thread = ThreadPoolExecutor(1, "ring-publisher")


class Publisher:
    """Ships what ``collect`` returns every PERIOD, with a status every STATUS_PERIOD, while the block runs.

    ``collect(status)`` returns the records that have come up, with a Status when it is asked for one.
    ``send`` takes one encoded message. What they raise is raised at the end of the block.
    """

    def __init__(self, collect: Callable[[bool], Sequence[Record]], send: Callable[[bytes], None]) -> None:
        self._collect = collect
        self._send = send
        self._stop = Event()

    def __enter__(self) -> Publisher:
        self._work = _thread.submit(self._publish)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._work.result()

    def _publish(self) -> None:
        tick = 0
        ticks_per_status = round(STATUS_PERIOD / PERIOD)
        while True:
            # The first says that the rank has begun, the second soon after where in the cell it is.
            records = self._collect(tick == 0 or tick % ticks_per_status == 1)
            if records:
                self._send(encode(records))
            tick += 1
            if self._stop.wait(PERIOD):
                return
