"""Keeps what a rank sends in a journal of its own, so that a notebook that attaches later has all of it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import time

from ring_notebook.files.appender import Appender
from ring_notebook.files.private_files import make_private_folder
from ring_notebook.records import stamped

_MOST_KEPT = 4 << 20  # bytes that wait in memory while the disk is full


class Spool:
    """The journal of this rank's newest run: ``directory/RUN.RANK``."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._journal: Appender | None = None
        make_private_folder(directory)

    def begin(self, run: str) -> None:
        """Forget the run before."""
        for old in self._directory.glob(f"*.{self._rank}"):
            old.unlink()
        if self._journal is not None:
            self._journal.close()
        self._journal = Appender(self._directory / f"{run}.{self._rank}", _MOST_KEPT)
        self._full = False
        with suppress(OSError):  # `add` tries again, and says why
            self._journal.flush()  # now, because the cell may use up all descriptors

    def add(self, message: bytes) -> str:
        """Append one message. Returns why it cannot, the first time in a run that the disk takes none; else nothing."""
        assert self._journal is not None
        self._journal.add(stamped(message, time()))
        try:
            self._journal.flush()
        except OSError as error:
            told, self._full = self._full, True
            return "" if told else f"{error.strerror} in {self._directory}"
        return ""
