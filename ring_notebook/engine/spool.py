"""Keeps what a rank sends in a file, so that a notebook that attaches later has all of it."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path

from ring_notebook.files.private_files import make_private_folder, open_private

__all__ = ["Spool"]

_LENGTH = struct.Struct("<I")


class Spool:
    """The messages of this rank's newest run, each behind its length, in ``directory/RUN.RANK``."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._descriptor = -1
        make_private_folder(directory)

    def begin(self, run: str) -> None:
        """Forget the run before."""
        for old in self._directory.glob(f"*.{self._rank}"):
            old.unlink()
        self._file = self._directory / f"{run}.{self._rank}"
        self._size = 0
        self._full = False
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        with suppress(OSError):  # `add` tries again, and says why
            self._open()

    def _open(self) -> None:
        """Once for all messages of a run: its cell may use up all descriptors."""
        make_private_folder(self._directory)  # somebody may have removed it
        with open_private(self._file, "ab") as file:
            self._descriptor = os.dup(file.fileno())

    def add(self, message: bytes) -> str:
        """Append one message. Returns why it cannot, the first time in a run that the disk takes none; else nothing."""
        try:
            if self._descriptor < 0:
                self._open()
            left = memoryview(_LENGTH.pack(len(message)) + message)
            while left:
                left = left[os.write(self._descriptor, left) :]
            self._size += _LENGTH.size + len(message)
        except OSError as error:
            with suppress(OSError):
                os.truncate(self._file, self._size)  # half a message would hide all that follow
            told, self._full = self._full, True
            return "" if told else f"{error.strerror} in {self._directory}"
        return ""
