"""Where every rank is now: the stacks that engines write to their logs on a signal, also while native code runs."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING

from ring_notebook.notebook.style import ranks

if TYPE_CHECKING:
    from ring_notebook.notebook.engines import Engine, Engines

__all__ = ["Frame", "Stack", "render", "stacks"]

_SECONDS_TO_WRITE = 2.0  # a stopped process writes nothing
_PERIOD = 0.01
# How a stack ends: with the call that began the engine, `python -m ipyparallel.engine`, or after a hundred calls.
_OUTERMOST = " in _run_module_as_main"
_CUT_OFF = "  ..."
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_HEAD = "Stack (most recent call first):"
_CELL = "<cell of run "


@dataclass(frozen=True, slots=True)
class Frame:
    """One call: ``file`` is ``<cell of run ID>`` for a line of a cell."""

    file: str
    line: int
    function: str

    @property
    def in_cell(self) -> bool:
        """Whether the line is one of a cell."""
        return self.file.startswith(_CELL)


@dataclass(frozen=True, slots=True)
class Stack:
    """The calls that the main thread of a rank is in, the newest last; none while no cell runs.

    ``trouble`` says why the stack is not known; empty where it is.
    """

    rank: int
    frames: tuple[Frame, ...] = ()
    trouble: str = ""


def stacks(engines: Engines, logs: Path) -> list[Stack]:
    """The stack of every rank, from ``rank-N.log`` in the folder ``logs``. Returns after at most 2 seconds."""
    files = [logs / f"rank-{engine.rank}.log" for engine in engines.all]
    before = [_size(file) for file in files]
    engines.signal(signal.SIGUSR1, range(len(files)))
    found: dict[int, tuple[Frame, ...]] = {}
    deadline = monotonic() + _SECONDS_TO_WRITE
    living = set(engines.living())
    while len(found) < len(living) and monotonic() < deadline:
        sleep(_PERIOD)
        for rank, (file, old) in enumerate(zip(files, before, strict=True)):
            if rank in living and rank not in found and (frames := parse(_read(file, old))) is not None:
                found[rank] = frames
    return [
        Stack(engine.rank, found[rank])
        if rank in found
        else Stack(engine.rank, trouble=_why_not(engine, before[rank], rank in living))
        for rank, engine in enumerate(engines.all)
    ]


def _why_not(engine: Engine, size: int, lives: bool) -> str:
    if not lives:
        return "it has died"
    if size < 0:
        return f"its log is on {engine.host}, which does not share this disk"
    return "its process does not react to signals: it is stopped or ending"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return -1


def _read(file: Path, start: int) -> str:
    if _size(file) <= start or start < 0:
        return ""
    with file.open("rb") as log:
        log.seek(start)
        return log.read().decode(errors="replace")


def parse(text: str) -> tuple[Frame, ...] | None:
    """The frames from the cell inward in what faulthandler has written, the newest last; None until it is complete.

    Of a stack that is too deep to be written, its inner frames.
    """
    _, head, last = text.rpartition(_HEAD)
    if not head:
        return None
    frames: list[Frame] = []
    for line in last.splitlines()[1:]:
        if match := _FRAME.match(line):
            frames.append(Frame(match["file"], int(match["line"]), match["function"]))
        if line.endswith(_OUTERMOST) or line == _CUT_OFF:
            outermost = max((index for index, frame in enumerate(frames) if frame.in_cell), default=-1)
            return tuple(reversed(frames if line == _CUT_OFF else frames[: outermost + 1]))
    return None


def render(found: Sequence[Stack], source: str, first_line: int) -> str:
    """The stacks as text, equal ones once. ``source`` is the cell that runs; ``first_line`` numbers its first line."""
    lines = source.splitlines()

    def shown(frame: Frame) -> str:
        where = "Cell" if frame.in_cell else frame.file
        index = frame.line - first_line
        code = f"\n      {lines[index].strip()}" if frame.in_cell and 0 <= index < len(lines) else ""
        return f"    {where}, line {frame.line}, in {frame.function}{code}"

    groups: dict[str, list[int]] = {}
    for one in found:
        body = one.trouble or "\n".join(map(shown, one.frames)) or "idle"
        groups.setdefault(body, []).append(one.rank)
    return "\n".join(
        f"{ranks(members)}:{chr(10) if body.startswith(' ') else ' '}{body}" for body, members in groups.items()
    )
