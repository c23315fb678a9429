"""Keeps the records of a rank in its journal, and sends them to the kernel, at most four messages a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from time import time

from ring_notebook.files.appender import Appender
from ring_notebook.files.private_files import make_private_folder
from ring_notebook.protocol.records import Record, messages, stamped

PERIOD = 0.25
"""Seconds between two messages of a rank that prints often."""

ROWS_EVERY = 2
"""Periods between two messages with only rows: each message costs the rank, the controller and the kernel half a
millisecond or more of processor time, which slows the training where they share its cores."""

STATUS_EVERY = 4
"""Periods between two statuses of a rank."""

_SOON = 4  # periods after the start in which everything is sent at once


# One thread for all runs: ipykernel keeps a socket open for every thread that has published.
_thread = ThreadPoolExecutor(1, "ring-publisher")


class Publisher:
    """A context that sends the records of ``collect`` every PERIOD seconds, with rows every ROWS_EVERY periods and a
    status every STATUS_EVERY periods.

    ``collect(rows, status)`` returns new records, with rows and a Status if requested. ``send`` takes one encoded
    message. Their first exception is raised at the end of the block; until then they are called again.
    """

    def __init__(self, collect: Callable[[bool, bool], Sequence[Record]], send: Callable[[bytes], None]) -> None:
        self._collect = collect
        self._send = send
        self._stop = Event()
        self._error: BaseException | None = None

    def __enter__(self) -> Publisher:
        self._work = _thread.submit(self._publish)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._work.result()
        if self._error is not None:
            raise self._error

    def _publish(self) -> None:
        tick = 0
        while True:
            rows = tick <= _SOON or tick % ROWS_EVERY == 0
            # The first status says that the rank has begun; the second follows soon and has the line of the cell.
            try:
                for message in messages(self._collect(rows, tick == 1 or tick % STATUS_EVERY == 0)):
                    self._send(message)
            except BaseException as error:  # these records are lost; there may be memory for the next ones
                self._error = self._error or error
            tick += 1
            if self._stop.wait(PERIOD):
                return


_MOST_KEPT = 4 << 20  # most bytes kept in memory while the disk is full


class Spool:
    """The journal of this rank's newest run: ``directory/RUN.RANK``."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._journal: Appender | None = None

    def begin(self, run: str) -> None:
        """Begin the journal of run ``run`` and remove the one before."""
        make_private_folder(self._directory)
        for old in self._directory.glob(f"*.{self._rank}"):
            old.unlink()
        if self._journal is not None:
            self._journal.close()
        self._journal = Appender(self._directory / f"{run}.{self._rank}", _MOST_KEPT)
        self._full = False
        with suppress(OSError):  # `add` tries again, and returns the reason
            self._journal.flush()  # opens the file now, because the cell may use up all descriptors

    def add(self, message: bytes) -> str:
        """Append one message. Returns the reason when that first fails in a run, else an empty text."""
        assert self._journal is not None
        self._journal.add(stamped(message, time()))
        try:
            self._journal.flush()
        except OSError as error:
            is_news, self._full = not self._full, True
            return f"{error.strerror} in {self._directory}" if is_news else ""
        return ""
