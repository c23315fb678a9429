"""What the core writes of a rank's native calls, as a user reads them: those within Python's innermost call."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import PurePath

__all__ = ["NativeFrame", "parse_native"]

_HEAD = "Native stack (most recent call first):\n"
_END = "End of native stack\n"
_UNNAMED = "?"
# What executes Python's own calls: everything further out is shown as those.
_INTERPRETER = re.compile(r"_PyEval_EvalFrame|_PyEval_Vector$|PyEval_EvalCode")
# How one function of the interpreter calls another.
_CALLS = re.compile(r"_?PyObject_(Call|Vectorcall|FastCall|MakeTpCall)|_?PyVectorcall_|_PyFunction_|_PyObject_Call")
_LONGEST = 120  # characters: names of C++ templates fill pages


@dataclass(frozen=True, slots=True)
class NativeFrame:
    """One call in native code. ``function`` is empty where its library does not export it."""

    function: str
    library: str

    def __str__(self) -> str:
        return f"native, in {f'{self.function} of ' * bool(self.function)}{self.library}"


def parse_native(text: str) -> tuple[NativeFrame, ...] | None:
    """The native calls within the innermost Python call, the newest last; None until all are written.

    Left out: functions of the interpreter that only call others, and repeated unnamed ones of one library.
    """
    _, head, last = text.rpartition(_HEAD)
    if not head or _END not in last:
        return None
    calls = [line.strip().partition(" of ") for line in last[: last.index(_END)].splitlines()]
    inner = list(takewhile(lambda call: not _INTERPRETER.match(call[0]), calls))
    interpreter = calls[len(inner)][2] if len(inner) < len(calls) else ""
    frames = [
        NativeFrame(_shortened(function) if function != _UNNAMED else "", PurePath(library).name)
        for function, _, library in inner
        if not (library == interpreter and (function == _UNNAMED or _CALLS.match(function)))
    ]
    return tuple(frame for frame, _ in groupby(reversed(frames)))


def _shortened(function: str) -> str:
    return function if len(function) <= _LONGEST else function[: _LONGEST - 3] + "..."
