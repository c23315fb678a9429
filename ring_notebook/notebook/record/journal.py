"""Reads a journal: the messages of ranks in a file, which a notebook or a rank may still be writing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ring_notebook.files.private_files import open_regular
from ring_notebook.records import Record, decode


class Journal:
    """The journal at ``path``. Each call of `lines` or `records` continues where the last one stopped.

    A line that is no record is skipped and counted in ``skipped``.
    """

    def __init__(self, path: Path) -> None:
        self.skipped = 0
        self._path = path
        self._position = 0
        self._now = 0.0

    def records(self, kind: str = "") -> Iterator[tuple[Record, float]]:
        """The new records, all or those of a kind, with the time at which each came."""
        wanted = f'{{"kind": "{kind}"'.encode() if kind else b""
        for line, now in self.lines():
            if line.startswith(wanted):
                try:
                    (record,) = decode(line)
                except ValueError:
                    self.skipped += 1
                    continue
                yield record, now

    def lines(self) -> Iterator[tuple[bytes, float]]:
        """The lines of the new records, each a message of its own, with the time at which each came.

        Nothing while the file is not there. Raises OSError and ValueError for what is no file.
        """
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return
        with file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):  # the writer is in the middle of it
                    return
                self._position += len(line)
                if line.startswith(b'{"time"'):
                    try:
                        self._now = float(json.loads(line)["time"])
                    except (ValueError, TypeError, RecursionError):
                        self.skipped += 1
                else:
                    yield line, self._now
