"""Appends chunks to a file; while the disk is full it keeps the newest in memory, and writes them later."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from ring_notebook.files.private_files import make_private_folder


class Appender:
    """A new file that only grows, by whole chunks: a chunk that cannot be written is not left half written.

    `add` keeps a chunk in memory, `flush` writes the kept chunks. Of chunks that could not be written the newest
    ``limit`` bytes are kept; ``lost`` counts the dropped ones. The first `flush` creates the file.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.lost = 0
        self.kept_bytes = 0
        self._limit = limit
        self._kept: deque[bytes] = deque()
        self._size = 0
        self._file = -1

    def add(self, chunk: bytes) -> None:
        """Keep a chunk for the next `flush`."""
        self._kept.append(chunk)
        self.kept_bytes += len(chunk)

    def flush(self) -> None:
        """Write the kept chunks. Raises OSError when a write fails; the rest is then still kept."""
        try:
            if self._file < 0:
                make_private_folder(self.path.parent)
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            while self._kept:
                self._write(self._kept[0])
                self.kept_bytes -= len(self._kept.popleft())
        except OSError:
            while self.kept_bytes > self._limit:
                self.kept_bytes -= len(self._kept.popleft())
                self.lost += 1
            raise

    def take_kept(self) -> bytes:
        """Take all chunks that could not be written; they are no longer kept."""
        kept = b"".join(self._kept)
        self._kept.clear()
        self.kept_bytes = 0
        return kept

    def close(self) -> None:
        """Close the file. Chunks that could not be written are still kept."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            os.ftruncate(self._file, self._size)  # half a chunk would spoil the next one
            os.lseek(self._file, self._size, os.SEEK_SET)
            raise
        self._size += len(chunk)
