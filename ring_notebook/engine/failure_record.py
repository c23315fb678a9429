"""An exception that ended a rank's cell, as a record."""

from __future__ import annotations

import builtins
import sys
import traceback
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType

import cloudpickle

from ring_notebook.errors import RingError
from ring_notebook.protocol.records import Failure
from ring_notebook.text.error_text import MOST, error_text, printable

# An exception may refer to a whole tensor. The message and the frames are sent in any case.
_PICKLE_LIMIT = 1 << 20
_PACKAGE = str(Path(__file__).parents[1])


def describe(error: BaseException, run: str, rank: int, cell: str, aborted: bool) -> Failure:
    """``error`` as a record for the kernel: its frames from the cell (compiled as the file ``cell``) inwards.

    ``aborted``: another rank failed first. Texts are shortened; a class that raises in ``__str__`` does no harm.
    """
    tb = from_cell(error, cell)
    _suggest(error, tb)
    kind: type[BaseException] = type(error)
    return Failure(
        run=run,
        rank=rank,
        ename=printable(type.__getattribute__(kind, "__name__")),
        module=printable(str(kind.__dict__.get("__module__", "builtins"))),
        message=error_text(error),
        frames=tuple(
            (
                "<cell>" if frame.filename == cell else printable(frame.filename),
                frame.lineno or 0,
                printable(frame.name),
                printable(frame.line or ""),
            )
            for frame in traceback.extract_tb(tb)
        ),
        traceback=printable(_formatted(error, tb), 2 * MOST),
        aborted=aborted,
        pickled=_pickled(error),
    )


def _suggest(error: BaseException, tb: TracebackType | None) -> None:
    """Name what a misspelt name may have meant, as Python at its prompt does, and its tracebacks from 3.12 on."""
    if sys.version_info >= (3, 12) or type(error) not in (NameError, AttributeError):
        return
    with suppress(Exception):  # raised by the object, or there is none
        if isinstance(error, AttributeError):
            known = dir(error.obj)
        else:
            *_, (frame, _) = traceback.walk_tb(tb)
            known = [*frame.f_locals, *frame.f_globals, *dir(builtins)]
        for near in get_close_matches(error.name, known, 1):  # type: ignore[attr-defined]
            error.args = (f"{error}. Did you mean: {near!r}?",)


def _formatted(error: BaseException, tb: TracebackType | None) -> str:
    try:
        about = traceback.TracebackException(type(error), error, tb, compact=True)
        if isinstance(error, RingError):  # its message suffices; frames of our own code do not help the user
            about.stack[:] = [frame for frame in about.stack if not frame.filename.startswith(_PACKAGE)]
        return "".join(about.format())
    except BaseException:  # raised by the exception itself, its notes or its cause
        frames = "".join(traceback.format_tb(tb))
        return f"Traceback (most recent call last):\n{frames}{type(error).__name__}: {error_text(error)}\n"


def from_cell(error: BaseException, cell: str) -> TracebackType | None:
    """The traceback from the cell inwards. If it has no frame in the cell: None for errors that need none, else all."""
    walk = error.__traceback__
    while walk is not None:
        if walk.tb_frame.f_code.co_filename == cell:
            return walk
        walk = walk.tb_next
    return None if isinstance(error, SyntaxError | RingError) else error.__traceback__


def _pickled(error: BaseException) -> str:
    try:
        data: bytes = cloudpickle.dumps(error)
    except BaseException:  # the class may raise anything
        return ""
    return data.hex() if len(data) <= _PICKLE_LIMIT else ""
