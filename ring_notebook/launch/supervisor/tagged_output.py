"""Passes on the output of ranks in whole lines, so that lines of several ranks do not mix.

Python without buffering writes a line and its newline in two pieces, between which another rank may write.
"""

from __future__ import annotations

import functools
import os
import re
import select
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO

from ring_notebook.machine.os_calls import exit_descriptor

TAGGED = "RING_TAGGED_OUTPUT"
"""Set where the job wants to know which rank has printed a line (`tagged`)."""
SHARED = -1
"""In place of a rank: what the job or its launcher has printed."""
_TAG = b"\x1d"
# A tag, if there is one, and what follows up to the next tag or the end of the line.
_PIECE = re.compile(rb"(?:\x1d(\d{1,9}):)?((?:[^\x1d\n]+|\x1d(?!\d{1,9}:))*\n?)")
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_UNFINISHED_TAG = re.compile(rb"\x1d\d{0,9}\Z")
_LONGEST_TAG = 16

HOLD = 0.1
"""Seconds that an unfinished line waits for its newline; a prompt or a progress bar has none."""
SOON = 0.01
"""Seconds within which the pieces of one line usually follow one another."""
LINGER = 1.0
"""Seconds for which output of processes that outlive the program is still passed on."""
_CAPACITY = 1 << 20  # bytes: no less than a pipe holds


def outlet(fd: int) -> int | None:
    """Popen's ``stdout`` (1) or ``stderr`` (2) for `carry`: a pipe. A terminal, where lines are whole, stays one."""
    return None if os.isatty(fd) else subprocess.PIPE


def carry(
    process: subprocess.Popen[bytes], rank: int | None = None, into: Callable[[int, bytes], object] | None = None
) -> Carrier:
    """Pass the output of ``process``, started with `outlet`, on to the stdout and stderr of this process.

    A given ``rank`` stands before each line; ``into`` replaces the write to these streams.
    """
    write = into or put

    def sink(fd: int, data: bytes) -> None:
        write(fd, data if rank is None else tagged(rank, data))

    sources = ((process.stdout, 1), (process.stderr, 2))
    return Carrier(process, {source: functools.partial(sink, fd) for source, fd in sources if source is not None})


def tagged(rank: int, data: bytes) -> bytes:
    """``data`` with its rank before each line, and before each part of one that is longer than a pipe takes at once."""
    tag, most = b"%b%d:" % (_TAG, rank), select.PIPE_BUF - _LONGEST_TAG
    if data.endswith(b"\n") and _TAG not in data and max(map(len, data.split(b"\n"))) < most:
        return tag + data[:-1].replace(b"\n", b"\n" + tag) + b"\n"
    parts = []
    for line in _LINE.findall(data.replace(_TAG, _TAG + b".")):
        at = 0
        while at < len(line):
            end = at + most
            if line[end - 1 : end] == _TAG:  # keep an escaped tag byte in one part
                end -= 1
            parts += [tag, line[at:end]]
            at = end
    return b"".join(parts)


def untagged(data: bytes, writer: int, ranks: int) -> tuple[list[tuple[int, bytes]], int, bytes]:
    """What `tagged` has made, in lines or parts of them with their ranks; the last writer; and an unfinished tag.

    ``writer`` is the last one before ``data``. A line that begins without a tag is nobody's (`SHARED`), and so is one
    whose tag names none of the ``ranks``.
    """
    rest = _UNFINISHED_TAG.search(data)
    kept = rest[0] if rest else b""
    found: list[tuple[int, bytes]] = []
    for match in _PIECE.finditer(data, 0, len(data) - len(kept)):
        if match[1] is not None:
            writer = int(match[1]) if int(match[1]) < ranks else SHARED
        if match[2]:
            found.append((writer, match[2].replace(_TAG + b".", _TAG)))
        if match[2].endswith(b"\n"):
            writer = SHARED  # until a tag says another
    return found, writer, kept


class Carrier(threading.Thread):
    """Passes what comes out of pipes to functions until the pipes close, at the latest soon after ``process`` exits.

    Not later, because a background process that has inherited the pipes may keep them open for ever. All output of
    ``process`` itself is passed on. An unfinished line waits ``hold`` seconds for its newline. Create it before the
    process is waited for, which `send_signal` does not do.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        sinks: Mapping[IO[bytes], Callable[[bytes], object]],
        hold: float = HOLD,
    ) -> None:
        super().__init__(name="ring-output", daemon=True)
        self._exited = exit_descriptor(process.pid)
        self._streams = [_Stream(source, sink, hold) for source, sink in sinks.items()]
        self.start()

    def run(self) -> None:
        until: float | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._exited, selectors.EVENT_READ)
            for stream in self._streams:
                selector.register(stream.source, selectors.EVENT_READ, stream)
            while self._streams:
                times = [stream.due for stream in self._streams if stream.due is not None]
                times += [] if until is None else [until]
                wait = max(0.0, min(times) - time.monotonic()) if times else None
                # One last look at the pipes, also when a slow reader has used up the time.
                last = until is not None and time.monotonic() >= until
                for key, _ in selector.select(wait):
                    if key.data is None:
                        selector.unregister(self._exited)
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
        os.close(self._exited)

    def _take(self, stream: _Stream) -> bool:
        for other in self._streams:
            if other is not stream:
                other.hurry()
        return stream.read()

    def _drop(self, stream: _Stream) -> None:
        self._streams.remove(stream)
        stream.source.close()


class _Stream:
    """One pipe and the unfinished line that came out of it. It ends when its reader has gone."""

    def __init__(self, source: IO[bytes], sink: Callable[[bytes], object], hold: float) -> None:
        self.source = source
        self.due: float | None = None
        self._since = 0.0  # when the unfinished line began
        self._sink = sink
        self._hold = hold
        self._held = b""

    def read(self) -> bool:
        """Pass on what has arrived. Returns whether more may arrive."""
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
        """Another pipe has output, which is newer than this unfinished line unless that began just now."""
        if self.due is not None:
            self.due = min(self.due, self._since + SOON)
            if time.monotonic() >= self.due:
                self.flush()

    def flush(self) -> bool:
        """Pass on the unfinished line. Returns whether more may arrive."""
        held, self._held, self.due = self._held, b"", None
        return self._give(held)

    def _give(self, data: bytes) -> bool:
        try:
            if data:
                self._sink(data)
        except OSError:  # the reader is gone: the program gets an error when it prints more
            return False
        return True


def pieces(data: bytes) -> Iterator[bytes]:
    """``data`` in pieces that a pipe takes as one each; they end with a line where that is not longer."""
    at = 0
    while at < len(data):
        window = at, at + select.PIPE_BUF
        end = data.rfind(b"\n", *window) + 1 or data.rfind(_TAG, at + 1, window[1])
        end = end if end > at else window[1]
        yield data[at:end]
        at = end


def put(fd: int, data: bytes) -> None:
    """Write all of ``data`` to ``fd`` so that lines which several threads write do not mix.

    ``fd`` may be non-blocking: ssh and Node.js make pipes so, for all processes that share them.
    """
    for piece in pieces(data):
        while piece:
            try:
                piece = piece[os.write(fd, piece) :]
            except BlockingIOError:
                room = select.poll()
                room.register(fd, select.POLLOUT)
                room.poll()
