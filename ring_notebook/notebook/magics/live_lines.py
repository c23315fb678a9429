"""Lines in the output of a cell that change while it is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from threading import Event, Thread
from time import monotonic

from IPython.display import display

_PERIOD = 0.5  # seconds
_FIRST = 0.3  # seconds until the line appears: what is quicker needs none


class Note:
    """A line in the output of the cell that makes it, which `tell` replaces later, from any thread."""

    def __init__(self) -> None:
        self._shown = ""
        self._display = display({"text/plain": ""}, raw=True, display_id=True)

    def tell(self, text: str) -> None:
        """Show ``text`` in place of what is there."""
        if text != self._shown:
            self._shown = text
            self._display.update({"text/plain": text, "text/html": f"<p>{escape(text)}</p>"}, raw=True)


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
