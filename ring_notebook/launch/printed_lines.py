"""What the user reads of the ranks' output: whose line it is, each traceback in one piece, and a file for each rank.

The processes that start ranks put the rank before each piece of a line (`tagged_output.tagged`); here it is taken off.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sysconfig
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Literal, TextIO

from ring_notebook.launch.supervisor.tagged_output import SHARED as _SHARED
from ring_notebook.launch.supervisor.tagged_output import untagged

_COLOURS = (36, 33, 35, 32, 34, 31)  # of ANSI terminals, by rank
_TRACEBACK = b"Traceback (most recent call last):"
# An exception group: its own traceback, then those of its exceptions, each line behind a margin.
_GROUP = b"  + Exception Group " + _TRACEBACK
_GROUP_PART = re.compile(rb"^ +\+(?:-\+)?-+ (?:\d+|\.\.\.) -+\n", re.MULTILINE)
_GROUP_END = re.compile(rb"^ +\+-+\n", re.MULTILINE)
_MARGIN = re.compile(rb"^ +[|+] ?", re.MULTILINE)
_COLOR = re.compile(rb"\x1b\[[\d;]*m")  # of Python 3.13, where FORCE_COLOR is set
_LONGEST_HOLD = 1.0  # seconds that an unfinished traceback is held back for the rest of it
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_TAG = re.compile(rb"^\x1d(\d{1,9}):", re.MULTILINE)
_FRAME = re.compile(rb'^ +File "([^"\n]+)", line (\d+)', re.MULTILINE)
_NOT_OURS = (str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


@dataclass(frozen=True, slots=True)
class Style:
    """How lines of one stream begin: with the rank, if there are several (``ranks``), in colour, with the time.

    In a job that grows there are up to ``most`` ranks.
    """

    ranks: int
    prefix: bool = True
    colour: bool = False
    times: bool = False
    most: int = 0

    @property
    def limit(self) -> int:
        return max(self.ranks, self.most)

    def before(self, rank: int) -> bytes:
        text = f"{datetime.now().isoformat(' ', 'milliseconds')} " if self.times else ""
        if self.prefix and self.limit > 1 and rank != _SHARED:
            name = f"[{rank:>{len(str(self.ranks - 1))}}]"
            text += f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{name}\x1b[0m " if self.colour else f"{name} "
        return text.encode()


class RankFiles:
    """The files ``folder/rank.N/stdout`` and ``stderr``, as horovodrun names them; N has leading zeros.

    Files of ranks beyond the first ``ranks`` are made when these print something.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self.error = ""
        """Why they are not complete."""
        self._folder = folder
        self._digits = len(str(ranks - 1))
        self._files: dict[tuple[int, str], BinaryIO] = {}
        for rank in range(ranks):
            self._open(rank)

    def _open(self, rank: int) -> None:
        own = self._folder / f"rank.{rank:0{self._digits}d}"
        own.mkdir(parents=True, exist_ok=True)
        for name in ("stdout", "stderr"):
            self._files[rank, name] = (own / name).open("wb", buffering=0)

    def write(self, rank: int, name: str, data: bytes) -> None:
        """Add what ``rank`` has printed; ``error`` then says why the disk took no more, if so."""
        if rank == _SHARED:
            return
        try:
            if (rank, name) not in self._files:
                self._open(rank)
            self._files[rank, name].write(data)
        except OSError as error:
            self.error = f"{error.filename or self._files[rank, name].name}: {error.strerror}"

    def close(self) -> None:
        for file in self._files.values():
            file.close()


@dataclass(slots=True)
class RankOutput:
    """One output stream of a job, which comes in pieces and leaves as the user reads it."""

    style: Style
    stream: Literal["stdout", "stderr"]
    files: RankFiles | None = None
    causes: dict[int, str] = field(default_factory=dict)
    """What each rank raised last, and where (`cause_of`)."""
    _kept: bytes = b""
    _writer: int = _SHARED  # rank of the next piece
    _open: int | None = None  # rank whose unfinished line was shown last
    _began: dict[int, bool] = field(default_factory=dict)  # whether a rank's next piece continues a line
    _held: dict[int, tuple[float, bytes]] = field(default_factory=dict)  # tracebacks, since when

    def feed(self, data: bytes) -> bytes:
        """The next piece of the stream, as the user reads it."""
        if self._is_plain(data):
            before = functools.lru_cache(lambda rank: self.style.before(int(rank)))
            return _TAG.sub(lambda tag: before(tag[1]), data)
        pieces, self._writer, self._kept = untagged(self._kept + data, self._writer, self.style.limit)
        shown = b"".join(self._take(rank, line) for rank, line in pieces)
        late = time.monotonic() - _LONGEST_HOLD
        for rank in [rank for rank, (since, _) in self._held.items() if since < late]:
            shown += self._release(rank)
        return shown

    def _is_plain(self, data: bytes) -> bool:
        """Whether ``data`` is whole lines of ranks only, as most bulk output is."""
        lines = data.count(b"\n")
        return (
            not (self.files or self._kept or self._held or self._open is not None or any(self._began.values()))
            and data.startswith(b"\x1d")
            and data.endswith(b"\n")
            and len(_TAG.findall(data)) == lines == data.count(b"\x1d")
            and b"\r" not in data
            and _TRACEBACK not in data
        )

    def close(self) -> bytes:
        """The stream has ended: what was held back."""
        rest, self._kept = self._kept, b""
        return b"".join(map(self._release, list(self._held))) + (self._show(_SHARED, rest) if rest else b"")

    def _take(self, rank: int, line: bytes) -> bytes:
        if rank == _SHARED:
            # Of the job itself, or the rest of a line that a launcher has cut.
            return self._show(_SHARED if self._open is None else self._open, line)
        if self.files:
            self.files.write(rank, self.stream, line)
        shown = b""
        if rank in self._held:
            since, text = self._held[rank]
            self._held[rank] = since, text + line
            last = _LINE.findall(text + line)[-1]
            # An error may quote the traceback of a callback, as in JAX: the exception there is the cause.
            within = last.startswith((b" ", b"\t", b"\n", _TRACEBACK)) or last.rstrip().endswith(_TRACEBACK)
            if not last.endswith(b"\n") or within:
                return b""
            if not text.startswith(_GROUP):
                return self._release(rank)
            # The last line of a group looks like that of a group within it: only what follows tells.
            self._held[rank] = since, text
            shown = self._release(rank)
        continues, self._began[rank] = self._began.get(rank, False), not line.endswith(b"\n")
        if self.stream == "stderr" and not continues and line.startswith((_TRACEBACK, _GROUP)):
            self._held[rank] = time.monotonic(), line
            self._began[rank] = False
            return shown
        return shown + self._show(rank, line)

    def _release(self, rank: int) -> bytes:
        _, text = self._held.pop(rank)
        if cause := cause_of(text):
            self.causes[rank] = cause
        return b"".join(self._show(rank, line) for line in _LINE.findall(text))

    def _show(self, rank: int, line: bytes) -> bytes:
        before = self.style.before(rank)
        # A progress bar writes over its line, and with it what stood before.
        shown = re.sub(rb"\r(?!\n|\Z)", lambda _: b"\r" + before, line)
        if self._open is None:
            shown = shown if line.startswith(b"\r") and shown != line else before + shown
        elif self._open != rank:
            shown = b"\n" + before + shown
        self._open = None if line.endswith(b"\n") else rank
        return shown


def cause_of(traceback: bytes) -> str:
    """What a traceback says in one line, such as ``ValueError: no luck at train.py:14``; empty when it is not whole.

    The place is the last one in the user's own files, relative to this folder where it is below. Of an exception group
    it is the first exception in it, and then the group.
    """
    traceback = _COLOR.sub(b"", traceback)
    if traceback.startswith(_GROUP):
        group, *parts = (_MARGIN.sub(b"", part) for part in _GROUP_PART.split(_GROUP_END.sub(b"", traceback)))
        first = next((part for part in parts if not part.startswith(_GROUP[4:])), None)
        if first is None:
            return ""
        name = group.splitlines()[-1].decode(errors="replace")
        return f"{cause_of(first) or first.decode(errors='replace').strip()}, in {name}"
    lines = [line for line in traceback.splitlines() if line.strip()]
    if len(lines) < 2 or lines[-1].startswith((b" ", b"\t")):
        return ""
    frames = [(path.decode(errors="replace"), line.decode()) for path, line in _FRAME.findall(traceback)]
    own = [frame for frame in frames if not frame[0].startswith((*_NOT_OURS, "<frozen"))] or frames
    what = lines[-1].decode(errors="replace").strip()
    if not own:
        return what
    path, number = own[-1]
    with contextlib.suppress(ValueError, OSError):
        path = str(Path(path).relative_to(Path.cwd()))
    return f"{what} at {path}:{number}"


def is_colourful(stream: TextIO | None) -> bool:
    """Whether ``stream`` shows colours: a terminal whose user has not refused them (NO_COLOR)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and stream is not None and stream.isatty()
