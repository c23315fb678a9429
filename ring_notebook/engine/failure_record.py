"""An exception that ended a rank's cell, as a record."""

from __future__ import annotations

import traceback
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
