"""Keeps what a rank sends in a file, so that a notebook which comes later has all of it."""

from __future__ import annotations

import struct
from pathlib import Path

__all__ = ["Spool"]

_LENGTH = struct.Struct("<I")


class Spool:
    """The messages of this rank's newest run, each behind its length, in ``directory/RUN.RANK``."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        directory.mkdir(parents=True, exist_ok=True)

    def begin(self, run: str) -> None:
        """Forget the run before."""
        for old in self._directory.glob(f"*.{self._rank}"):
            old.unlink()
        self._file = self._directory / f"{run}.{self._rank}"

    def add(self, message: bytes) -> None:
        """Append one message."""
        with self._file.open("ab") as file:
            file.write(_LENGTH.pack(len(message)) + message)
