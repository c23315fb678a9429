"""Keeps what a rank sends in a file, so that a notebook which comes later has all of it."""

from __future__ import annotations

import struct
from pathlib import Path

from ring_notebook.private_files import make_private_folder, open_private

__all__ = ["Spool"]

_LENGTH = struct.Struct("<I")


class Spool:
    """The messages of this rank's newest run, each behind its length, in ``directory/RUN.RANK``."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        make_private_folder(directory)

    def begin(self, run: str) -> None:
        """Forget the run before."""
        for old in self._directory.glob(f"*.{self._rank}"):
            old.unlink()
        self._file = self._directory / f"{run}.{self._rank}"

    def add(self, message: bytes) -> None:
        """Append one message."""
        with open_private(self._file, "ab") as file:
            file.write(_LENGTH.pack(len(message)) + message)
