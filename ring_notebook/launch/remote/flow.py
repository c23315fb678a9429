"""Streams that cross from one host to another no faster than their reader reads: a window of bytes on their way."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

WINDOW = 1 << 20
"""Bytes of a stream on their way, besides the piece that fills the window."""


class Window:
    """The sending side: `take` waits while too much is on its way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._on_the_way = 0
        self._closed = False

    def take(self, size: int) -> None:
        """``size`` bytes are about to be sent. Raises BrokenPipeError when nobody reads any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._on_the_way < WINDOW or self._closed)
            if self._closed:
                raise BrokenPipeError("the reader of the output has gone")
            self._on_the_way += size

    def give(self, size: int) -> None:
        """The other side has passed ``size`` bytes on."""
        with self._changed:
            self._on_the_way -= size
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody reads any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Inlet(threading.Thread):
    """The receiving side: passes pieces on to ``sink``, which may block, and tells ``taken`` how much it has taken.

    ``taken`` gets 0, once, when the sink raises OSError: its reader has gone. ``end`` is called after the last piece.
    """

    def __init__(
        self, sink: Callable[[bytes], object], taken: Callable[[int], object], end: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(name="ring-inlet", daemon=True)
        self._sink = sink
        self._taken = taken
        self._end = end
        self._pieces: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.start()

    def put(self, piece: bytes) -> None:
        """The next piece; an empty one is the end."""
        self._pieces.put(piece)

    def run(self) -> None:
        """Pass on what comes until the end."""
        open_ = True
        while piece := self._pieces.get():
            try:
                if open_:
                    self._sink(piece)
                    self._taken(len(piece))
            except OSError:
                open_ = False
                self._taken(0)
        self._end()
