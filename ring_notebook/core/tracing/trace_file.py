"""A Chrome trace on disk that grows while its rank runs and is whole JSON between additions."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

PERIOD = 1.0
"""Seconds between additions."""
_BEGIN, _END = b'{"displayTimeUnit": "ms", "traceEvents": [', b"\n]}\n"

Events = Sequence[dict[str, Any]]


class GrowingTrace:
    """The file ``path``, to which a thread adds what ``take`` gives, until `close`.

    ``shown`` is a second name of the file while it grows, if any; a file of that name gives way. What the disk does not
    take fails no training: the file is removed, a line on stderr says why, and nothing more is written.
    """

    def __init__(self, path: Path, shown: Path | None, begin: Events, take: Callable[[], Events]) -> None:
        self._path = path
        self._shown = shown
        self._take = take
        self._file = -1
        self._size = len(_BEGIN)
        self._closing = Event()
        try:
            path.unlink(missing_ok=True)  # it may have a second name, from a job that was killed
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.pwrite(self._file, _BEGIN + _END, 0)
            self._add(begin)
            self._show()
        except OSError as error:
            self._fail(error)
        self._thread = Thread(target=self._grow, name="ring-timeline", daemon=True)
        self._thread.start()

    def close(self) -> Events:
        """Add the rest; returns everything that is in the file."""
        self._closing.set()
        self._thread.join()
        self._add_new()
        if self._file < 0:
            return []
        os.close(self._file)
        events: Events = json.loads(self._path.read_bytes())["traceEvents"]
        return events

    def _grow(self) -> None:
        while not self._closing.wait(PERIOD):
            self._add_new()

    def _add_new(self) -> None:
        events = self._take()
        if self._file >= 0 and events:
            try:
                self._add(events)
            except OSError as error:
                self._fail(error)

    def _add(self, events: Events) -> None:
        # Over the old end, with a new one, in one write: only a reader in this very moment may find half of both.
        comma = b",\n" if self._size > len(_BEGIN) else b"\n"
        data = comma + ",\n".join(map(json.dumps, events)).encode()
        left, at = memoryview(data + _END), self._size
        while left:
            written = os.pwrite(self._file, left, at)
            left, at = left[written:], at + written
        self._size += len(data)

    def _show(self) -> None:
        if self._shown is None or (self._shown.exists() and not self._shown.is_file()):  # a device
            return
        with suppress(OSError):  # a file system without links: only `path` is there while it grows
            self._shown.unlink(missing_ok=True)
            os.link(self._path, self._shown)

    def _fail(self, error: OSError) -> None:
        if self._file >= 0:
            if self._shown is not None and self._shown.exists() and self._shown.samefile(self._path):
                self._shown.unlink()
            os.close(self._file)
            self._file = -1
        report_unwritten(self._path, error)


def report_unwritten(path: Path, error: OSError) -> None:
    """Say on stderr that ``path`` cannot be written, and remove what there is of it."""
    with suppress(OSError):
        if path.is_file():  # and not a device
            path.unlink()
    print(f"the timeline {path} cannot be written: {error.strerror}", file=sys.stderr)  # noqa: T201
