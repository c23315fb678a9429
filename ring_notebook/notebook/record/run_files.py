"""The files of a run: written even if the disk fills up meanwhile, read while ranks still write them."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ring_notebook.files.appender import Appender
from ring_notebook.files.private_files import make_private_folder, open_private, open_regular, replace_text
from ring_notebook.files.run_folders import SUMMARY
from ring_notebook.protocol.records import Record, decode, stamped
from ring_notebook.text.error_text import printable

JOURNAL = "journal.jsonl"  # everything that the ranks have sent: a line for each record, between lines with the time
OUTPUT_TEXT = "output.txt"  # what was printed as text, once a user has asked for it
TIMELINE = "timeline.json"  # of a run with --timeline: what all ranks did, in Chrome's trace format

_MOST_KEPT = 32 << 20  # bytes that wait in memory while the disk is full
_WRITE_AT = 1 << 20  # bytes, so that a backlog is not held twice
_SUMMARY_BYTES, _SUMMARY_BYTES_PER_RANK = 16_384, 512


def notebook() -> str:
    """The notebook of this kernel, as Jupyter's server tells it; empty if nothing does."""
    return os.environ.get("JPY_SESSION_NAME", "")


class RunFiles:
    """Appends to the files of one run. One thread writes.

    A full disk does not stop the run: messages then wait in memory (`Appender`), and ``trouble`` says so.
    Raises OSError when the files cannot be created, or there is no room for the summary of ``ranks`` ranks.
    """

    def __init__(self, directory: Path, ranks: int) -> None:
        make_private_folder(directory)
        self._directory = directory
        self.trouble = ""
        self._reserve = directory / "summary.reserved"
        _reserve(self._reserve, _SUMMARY_BYTES + ranks * _SUMMARY_BYTES_PER_RANK)
        self._journal = Appender(directory / JOURNAL, _MOST_KEPT)
        self._journal.flush()
        self._traces: Appender | None = None

    @property
    def lost(self) -> int:
        """How many messages were dropped: the oldest that the disk did not take."""
        return self._journal.lost

    def add(self, message: bytes, now: float) -> None:
        """Append one message to the journal."""
        self._journal.add(stamped(message, now))
        if self._journal.kept_bytes > _WRITE_AT + (_MOST_KEPT if self.trouble else 0):
            self.flush()

    def add_trace(self, events: bytes) -> None:
        """Append one rank's array of events to the other ranks' arrays, without parsing it."""
        if self._traces is None:
            self._traces = Appender(self._timeline(".partial"), sys.maxsize)  # each rank sends one, bounded by the core
            self._traces.add(b'{"displayTimeUnit": "ms", "traceEvents": [')
        else:
            self._traces.add(b",\n")
        self._traces.add(events.strip()[1:-1])

    def flush(self) -> None:
        """Hand everything to the operating system, as far as the disk takes it; ``trouble`` says when it does not."""
        trouble = ""
        for file in filter(None, (self._journal, self._traces)):
            try:
                file.flush()
            except OSError as error:
                trouble = f"{error.strerror} in {self._directory}"
        self.trouble = trouble

    def close(self) -> Path | None:
        """Write everything and close the files.

        If the disk is still full, the rest goes to a temporary folder, which is returned; its journal has the same
        name. If that is full too, the rest is lost and ``trouble`` stays set.
        """
        if self._traces is not None:
            self._traces.add(b"]}")
        self.flush()
        rest = self._write_elsewhere() if self.trouble else None
        self._journal.close()
        if self._traces is not None:
            self._traces.close()
            self._timeline(".partial").replace(self._timeline())
        return rest

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write how the run ended into the room that was reserved for it; what does not fit is left out."""
        shorter = {
            **_without_values(summary),
            "error": summary["error"][:4096],
            "shown": printable(summary["shown"], 4096),
            "ranks": [_without_values(one) for one in summary["ranks"]],
        }
        for content in (summary, shorter):
            data = (json.dumps(content, indent=1, default=str) + "\n").encode()
            try:
                with self._reserve.open("r+b") as file:
                    file.write(data)
                    file.truncate(len(data))
                self._reserve.replace(self._directory / SUMMARY)
                return
            except OSError as error:
                self.trouble = f"{error.strerror} in {self._directory}"

    def _write_elsewhere(self) -> Path | None:
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"ring-{self._directory.name}-"))
            (folder / JOURNAL).write_bytes(self._journal.take_kept())
        except OSError:
            return None
        return folder

    def _timeline(self, suffix: str = ".json") -> Path:
        return (self._directory / TIMELINE).with_suffix(suffix)


def _reserve(path: Path, nbytes: int) -> None:
    """Take the room that a summary needs, so that a full disk cannot keep it from being written."""
    with open_private(path, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            # The file system reserves nothing.


def _without_values(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary of a run, or of one of its ranks, without the last values of metrics."""
    return {name: value for name, value in summary.items() if name != "last"}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace ``path`` as a whole, so that a reader never sees half of it."""
    replace_text(path, json.dumps(content, indent=1, default=str) + "\n")


def read_text(path: Path) -> str:
    """The content of ``path``; empty when it is not there.

    Another kernel that ends the cluster may remove its files at any moment. Raises as `open_regular`.
    """
    try:
        with open_regular(path) as file:
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; empty when the file is not there. Raises ValueError when it holds something else."""
    try:
        content = json.loads(read_text(path) or "{}")
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is truncated or no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


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
        """The new records, all or of one kind, each with the time at which it came."""
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
        """The lines of the new records, each a message of its own, with the time at which it came.

        Nothing while the file does not exist. Raises OSError and ValueError if it is no regular file.
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
