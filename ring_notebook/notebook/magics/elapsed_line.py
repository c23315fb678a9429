"""A line that counts the seconds of something long, in place: an empty cell says nothing of what goes on."""

from __future__ import annotations

import sys
from threading import Event, Thread
from time import monotonic

__all__ = ["ElapsedLine"]

_PERIOD = 0.5  # seconds
_FIRST = 0.3  # seconds until the line appears: what is quicker needs none


class ElapsedLine:
    """Shows ``text`` and the seconds on standard output while the block runs; nothing is left of it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._ended = Event()
        self._width = 0
        self._thread = Thread(target=self._show, name="ring-elapsed", daemon=True)

    def __enter__(self) -> None:
        self._started = monotonic()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._width:
            self._write(f"\r{' ' * self._width}\r")

    def _show(self) -> None:
        wait = _FIRST
        while not self._ended.wait(wait):
            line = f"{self._text} {monotonic() - self._started:.1f} s"
            self._width = max(self._width, len(line))
            self._write(f"\r{line}")
            wait = _PERIOD

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
