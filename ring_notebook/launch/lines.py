"""What a program prints, carried on in whole lines: those of several ranks do not mix within a line.

A Python that does not buffer, as MPI has it, writes a line and its end in two pieces, between which others' may come.
"""

from __future__ import annotations

import functools
import os
import select
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO

__all__ = ["SOON", "Carrier", "carry", "outlet", "pieces"]

HOLD = 0.1
"""Seconds that the beginning of a line waits for its end, which that of a prompt or a progress bar may not have."""
SOON = 0.01
"""Seconds in which the pieces of one line follow one another, most often."""
LINGER = 1.0
"""Seconds in which what processes print that outlive the program is still carried."""
_CAPACITY = 1 << 20  # bytes: no less than a pipe holds


def outlet(fd: int) -> int | None:
    """Popen's ``stdout`` (1) or ``stderr`` (2) for `carry`: a pipe. A terminal, where lines are whole, stays one."""
    return None if os.isatty(fd) else subprocess.PIPE


def carry(process: subprocess.Popen[bytes]) -> Carrier:
    """Begin to carry what ``process``, started with `outlet`, prints to this process's own stdout and stderr."""
    sources = ((process.stdout, 1), (process.stderr, 2))
    return Carrier(process, {source: functools.partial(_put, fd) for source, fd in sources if source is not None})


class Carrier(threading.Thread):
    """Carries what comes out of pipes to functions that take it, until they end, or a moment after ``process`` has.

    That moment is for what outlives the process and has inherited the pipes: a background process would keep them open
    for as long as it likes. All that ``process`` itself has printed is carried. The end of a line is waited for during
    ``hold`` seconds. To be made before the process is waited for.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        sinks: Mapping[IO[bytes], Callable[[bytes], object]],
        hold: float = HOLD,
    ) -> None:
        super().__init__(name="ring-output", daemon=True)
        self._pidfd = os.pidfd_open(process.pid)
        self._streams = [_Stream(source, sink, hold) for source, sink in sinks.items()]
        self.start()

    def run(self) -> None:
        """Carry."""
        until: float | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._pidfd, selectors.EVENT_READ)
            for stream in self._streams:
                selector.register(stream.source, selectors.EVENT_READ, stream)
            while self._streams:
                times = [stream.due for stream in self._streams if stream.due is not None]
                times += [] if until is None else [until]
                wait = max(0.0, min(times) - time.monotonic()) if times else None
                # Also when taking what came before has taken long: one last look at what there is.
                last = until is not None and time.monotonic() >= until
                for key, _ in selector.select(wait):
                    if key.data is None:
                        selector.unregister(self._pidfd)
                        until = time.monotonic() + LINGER
                    elif not self._take(key.data):
                        selector.unregister(key.data.source)
                        self._drop(key.data)
                for stream in list(self._streams):
                    if stream.due is not None and time.monotonic() >= stream.due and not stream.flush():
                        selector.unregister(stream.source)
                        self._drop(stream)
                if last:
                    break
        for stream in list(self._streams):
            stream.flush()
            self._drop(stream)
        os.close(self._pidfd)

    def _take(self, stream: _Stream) -> bool:
        for other in self._streams:
            if other is not stream:
                other.hurry()
        return stream.read()

    def _drop(self, stream: _Stream) -> None:
        self._streams.remove(stream)
        stream.source.close()


class _Stream:
    """One pipe, and the beginning of a line that came out of it. Where nobody takes what comes, it has ended."""

    def __init__(self, source: IO[bytes], sink: Callable[[bytes], object], hold: float) -> None:
        self.source = source
        self.due: float | None = None
        self._since = 0.0  # when the beginning of the line came
        self._sink = sink
        self._hold = hold
        self._held = b""

    def read(self) -> bool:
        """Carry on what has come. Returns whether more may come."""
        data = os.read(self.source.fileno(), _CAPACITY)
        end = data.rfind(b"\n") + 1
        whole = self._held + data[:end] if end else b""
        self._held = data[end:] if end else self._held + data
        if not self._held:
            self.due = None
        elif end or self.due is None:
            self._since = time.monotonic()
            self.due = self._since + self._hold
        if not data:
            self.flush()
            return False
        return self._give(whole)

    def hurry(self) -> None:
        """Something has come elsewhere. It came later than the beginning of a line, unless that is of this moment."""
        if self.due is not None:
            self.due = min(self.due, self._since + SOON)
            if time.monotonic() >= self.due:
                self.flush()

    def flush(self) -> bool:
        """Carry on the beginning of a line without its end. Returns whether more may come."""
        held, self._held, self.due = self._held, b"", None
        return self._give(held)

    def _give(self, data: bytes) -> bool:
        try:
            if data:
                self._sink(data)
        except OSError:  # the program is told when it prints more, as if it had the reader that is gone itself
            return False
        return True


def pieces(data: bytes) -> Iterator[bytes]:
    """``data`` in pieces that a pipe takes as one each; they end with a line where that is not longer."""
    at = 0
    while at < len(data):
        end = data.rfind(b"\n", at, at + select.PIPE_BUF) + 1 or at + select.PIPE_BUF
        yield data[at:end]
        at = end


def _put(fd: int, data: bytes) -> None:
    for piece in pieces(data):
        while piece:
            piece = piece[os.write(fd, piece) :]
