"""A line on standard output that changes while a cell is executed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Event, Thread
from time import monotonic

_PERIOD = 0.5  # seconds
_FIRST = 0.3  # seconds until the line appears: quicker work needs none


class ElapsedLine:
    """Shows ``text`` (or what it returns) and the seconds on standard output while the block runs, and removes them."""

    def __init__(self, text: str | Callable[[], str]) -> None:
        self._text = text
        self._ended = Event()
        self._width = 0
        self._thread = Thread(target=self._show, name="ring-elapsed", daemon=True)

    def __enter__(self) -> None:
        self._started = monotonic()
        try:
            self._thread.start()
        except BaseException:  # an interrupt: nobody would call __exit__
            self._ended.set()
            raise

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._width:
            self._write(f"\r{' ' * self._width}\r")

    def _show(self) -> None:
        wait = _FIRST
        while not self._ended.wait(wait):
            text = self._text if isinstance(self._text, str) else self._text()
            line = f"{text} {monotonic() - self._started:.1f} s"
            self._write(f"\r{line:<{self._width}}")
            self._width = max(self._width, len(line))
            wait = _PERIOD

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
