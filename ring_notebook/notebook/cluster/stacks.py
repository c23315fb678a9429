"""Where every rank is now: the stacks that engines write to their logs on a signal, also while native code runs."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path, PurePath
from time import monotonic, sleep
from typing import TYPE_CHECKING

from ring_notebook.files.rank_logs import CRASH, log_path
from ring_notebook.machine.process_life import is_stopped
from ring_notebook.text.error_text import CELL
from ring_notebook.text.words import first_characters, ranks

if TYPE_CHECKING:
    from ring_notebook.notebook.engines import Engines
    from ring_notebook.notebook.record.run_record import RunRecord


# An overloaded machine answers late; a process that waits in the kernel for a dead disk never answers.
_SECONDS_TO_WRITE = 10.0
_SECONDS_TO_TELL = 5.0
_PERIOD = 0.01
_RANK_SIDE = "ring_notebook.engine.own_stack:tell"
_STOPPED = "a signal or a debugger has stopped it; `kill -CONT {pid}`, or the debugger, lets it continue"
_SILENT = "its process does not react to signals: it is ending, or waits in the kernel, as for a disk that is gone"
_SILENT_THERE = (
    "it does not answer: it is stopped, or native code holds its interpreter; its log is on {host}, which does "
    "not share this disk"
)
# A stack ends with our own program, from any path, or after a hundred calls.
_OUTERMOST = re.compile(r'.*/engine_program\.py", line \d+ in <module>$')
_CUT_OFF = "  ..."
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_HEAD = "Stack (most recent call first):"


@dataclass(frozen=True, slots=True)
class Frame:
    """One call: ``file`` is ``<cell of run ID>`` for a line of a cell."""

    file: str
    line: int
    function: str

    @property
    def in_cell(self) -> bool:
        return CELL.fullmatch(self.file) is not None


@dataclass(frozen=True, slots=True)
class Stack:
    """The calls that the main thread of a rank is in, the newest last; none while no cell runs.

    ``native`` are those of C and C++ that the last of ``frames`` has led to; none while Python itself executes.
    ``trouble`` says why the stack is not known; empty if it is.
    """

    rank: int
    frames: tuple[Frame, ...] = ()
    trouble: str = ""
    native: tuple[NativeFrame, ...] = ()


def stacks(engines: Engines, logs: Path) -> list[Stack]:
    """The stack of every rank, from ``rank-N.log`` in the folder ``logs``, or from the rank where that is elsewhere.

    Returns after at most 15 seconds, and at once where every rank answers, has died or is stopped.
    """
    files = [log_path(logs, engine.rank, CRASH) for engine in engines.all]
    before = [_size(file) for file in files]
    living = engines.living()
    found = {rank: Stack(engines.all[rank].rank, trouble="it has died") for rank in range(len(files))}
    for rank in living:
        del found[rank]
    here = [rank for rank in living if before[rank] >= 0 and engines.all[rank].local]
    engines.signal(signal.SIGUSR1, here)
    found.update(_from_afar(engines, [rank for rank in living if rank not in here]))
    deadline = monotonic() + _SECONDS_TO_WRITE
    while missing := [rank for rank in here if rank not in found]:
        late = monotonic() > deadline
        if late:  # the signal does not come through: the cell has a handler of its own for it, or the disk is full
            answered = {rank: one for rank, one in _from_afar(engines, missing).items() if not one.trouble}
            found.update(answered)
            missing = [rank for rank in missing if rank not in answered]
        for rank in missing:
            engine = engines.all[rank]
            if one := _stack(engine.rank, _read(files[rank], before[rank])):
                found[rank] = one
            elif engine.local and is_stopped(engine.pid):
                found[rank] = Stack(engine.rank, trouble=_STOPPED.format(pid=engine.pid))
            elif late:
                found[rank] = Stack(engine.rank, trouble=_SILENT)
        sleep(_PERIOD)
    return [found[rank] for rank in range(len(files))]


def _from_afar(engines: Engines, ranks: Sequence[int]) -> dict[int, Stack]:
    """The stacks that ranks send whose log is on a disk that this host does not see."""
    texts = engines.call_beside(_RANK_SIDE, ranks=ranks, timeout=_SECONDS_TO_TELL) if ranks else []
    return {
        rank: _stack(engines.all[rank].rank, text or "")
        or Stack(engines.all[rank].rank, trouble=_SILENT_THERE.format(host=engines.all[rank].host))
        for rank, text in zip(ranks, texts, strict=True)
    }


def _stack(rank: int, written: str) -> Stack | None:
    """The stack of ``rank`` when all of it is written."""
    frames, native = parse(written), parse_native(written)
    if frames is None or native is None:
        return None
    return Stack(rank, frames, native=native if frames else ())


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

    Only the inner frames of a stack that faulthandler has cut off.
    """
    _, head, last = text.rpartition(_HEAD)
    if not head:
        return None
    frames: list[Frame] = []
    for line in last.splitlines()[1:]:
        if match := _FRAME.match(line):
            frames.append(Frame(match["file"], int(match["line"]), match["function"]))
        if _OUTERMOST.match(line) or line == _CUT_OFF:
            outermost = max((index for index, frame in enumerate(frames) if frame.in_cell), default=-1)
            return tuple(reversed(frames if line == _CUT_OFF else frames[: outermost + 1]))
    return None


def render(found: Sequence[Stack], runs: Sequence[RunRecord]) -> str:
    """The stacks as text, equal ones once, with the lines of the cells of ``runs``."""
    cells = {run.run: run for run in runs}

    def shown(frame: Frame) -> str:
        cell = CELL.fullmatch(frame.file)
        where = "Cell" if cell else frame.file
        code = cells[cell["run"]].code_at(frame.line) if cell and cell["run"] in cells else ""
        place = f"    {where}, line {frame.line}, in {frame.function}"
        return f"{place}\n      {code}" if code else place

    groups: dict[str, list[int]] = {}
    for one in found:
        calls = [*map(shown, one.frames), *(f"    {frame}" for frame in one.native)]
        body = one.trouble or "\n".join(calls) or "idle"
        groups.setdefault(body, []).append(one.rank)
    return "\n".join(
        f"{ranks(members)}:{chr(10) if body.startswith(' ') else ' '}{body}" for body, members in groups.items()
    )


_NATIVE_HEAD = "Native stack (most recent call first):\n"
_END = "End of native stack\n"
_UNNAMED = re.compile(r"\?|\+0x")
# The interpreter's evaluation loop: Python frames show everything outside of it.
_INTERPRETER = re.compile(r"_PyEval_EvalFrame|_PyEval_Vector$|PyEval_EvalCode")
# How one function of the interpreter calls another.
_CALLS = re.compile(r"_?PyObject_(Call|Vectorcall|FastCall|MakeTpCall)|_?PyVectorcall_|_PyFunction_|_PyObject_Call")
_LONGEST = 120  # characters: names of C++ templates fill pages


@dataclass(frozen=True, slots=True)
class NativeFrame:
    """One call in native code. ``function`` is its offset, ``+0x1f3a``, where its library does not export the name."""

    function: str
    library: str

    def __str__(self) -> str:
        return f"native, in {self.function} of {self.library}"


def parse_native(text: str) -> tuple[NativeFrame, ...] | None:
    """The native calls within the innermost Python call, the newest last; None until all are written.

    Left out: functions of the interpreter that only call others, and repeated unnamed ones of one library.
    """
    _, head, last = text.rpartition(_NATIVE_HEAD)
    if not head or _END not in last:
        return None
    calls = [line.strip().partition(" of ") for line in last[: last.index(_END)].splitlines()]
    inner = list(takewhile(lambda call: not _INTERPRETER.match(call[0]), calls))
    interpreter = calls[len(inner)][2] if len(inner) < len(calls) else ""
    frames = [
        NativeFrame(first_characters(function, _LONGEST), PurePath(library).name)
        for function, _, library in inner
        if not (library == interpreter and (_UNNAMED.match(function) or _CALLS.match(function)))
    ]
    alike = groupby(reversed(frames), lambda one: ("" if _UNNAMED.match(one.function) else one.function, one.library))
    return tuple([*some][-1] for _, some in alike)
