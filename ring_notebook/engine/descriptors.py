"""What this engine and its children write below Python, to descriptors 1 and 2: C libraries, programs, forks.

Both are files, which this module reads while a cell runs. A file, unlike a pipe, never stops its writer, and keeps what
an engine has written last when it dies.
"""

from __future__ import annotations

import codecs
import ctypes
import fcntl
import io
import os
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ring_notebook.files import rank_logs

Stream = Literal["stdout", "stderr"]

_CAPACITY = 1 << 20
_SECONDS_TO_READ = 2.0  # at most, of another thread
_LINE_BUFFERED = 1  # _IOLBF


class _Tail:
    """One file, and how far it was read."""

    def __init__(self, stream: Stream) -> None:
        self.stream: Stream = stream
        self.file = -1
        self._read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self) -> Iterator[str]:
        """What was written since the last call."""
        size = os.fstat(self.file).st_size
        self._read = self._read if self._read <= size else 0  # `> /dev/stdout` of a shell empties the file
        while self._read < size and (data := os.pread(self.file, min(_CAPACITY, size - self._read), self._read)):
            self._read += len(data)
            if text := self._decoder.decode(data):
                yield text


_tails = _Tail("stdout"), _Tail("stderr")
_kept_in: tuple[Path, int] | None = None  # the folder, and the rank that has these files there
_lock = threading.Lock()
_taker: int | None = None  # the thread that holds it


def redirect(folder: Path, rank: int) -> int:
    """Redirect descriptors 1 and 2 to files: ``rank-N.out`` and ``rank-N.err`` in ``folder``.

    Where there is no such folder the files have no name. Returns the descriptor for what a crash writes: that of
    ``rank-N.log``, or what descriptor 2 was.
    """
    global _kept_in
    named = folder.is_dir()
    crashes = _create(rank_logs.log_path(folder, rank, rank_logs.CRASH)) if named else os.dup(2)
    for descriptor, tail in enumerate(_tails, 1):
        file = -1
        if named:
            file = _create(rank_logs.log_path(folder, rank, tail.stream[3:]))
        else:
            with suppress(OSError), tempfile.TemporaryFile() as unnamed:
                file = os.dup(unnamed.fileno())
                fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
        if file >= 0:
            os.dup2(file, descriptor)
            tail.file = file  # not the descriptor, which a cell may redirect
    for stream in (sys.__stdout__, sys.__stderr__):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    _buffer_lines()
    if named:
        _kept_in = folder, rank
        cell_begins()
    return crashes


def cell_begins() -> None:
    """Mark the present text of these files as that of earlier cells."""
    if _kept_in is not None:
        rank_logs.cell_begins(*_kept_in)


def take() -> Generator[tuple[Stream, str], None, None]:
    """What was written since the last call, by any caller.

    Other threads wait until all of it is taken, so that text which they add comes after it. A thread that calls this
    while it takes, as a finalizer does, gets nothing.
    """
    global _taker
    if _taker == threading.get_ident() or not _lock.acquire(timeout=_SECONDS_TO_READ):
        return
    _taker = threading.get_ident()
    try:
        with suppress(OSError):  # the cell has closed the files
            for tail in _tails:
                if tail.file >= 0:
                    for text in tail.take():
                        yield tail.stream, text
    finally:
        _taker = None
        _lock.release()


def flush() -> None:
    """Write what the C library still holds for descriptor 1."""
    with suppress(AttributeError, ValueError, OSError):
        libc = ctypes.CDLL(None)
        libc.fflush(ctypes.c_void_p.in_dll(libc, "stdout"))


def _create(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o600)


def _buffer_lines() -> None:
    """Have C's stdout write line by line, as on a terminal: for a file it keeps 4 KiB."""
    with suppress(AttributeError, ValueError, OSError):  # of another C library
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _LINE_BUFFERED, ctypes.c_size_t(0))
