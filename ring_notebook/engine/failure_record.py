"""An exception that ended a rank's cell, as a record."""

from __future__ import annotations

import traceback
from types import TracebackType

import cloudpickle

from ring_notebook.errors import CollectiveAborted
from ring_notebook.records import Failure

__all__ = ["describe"]

# An exception may drag a whole tensor along; the message and the frames travel anyway.
_PICKLE_LIMIT = 1 << 20


def describe(error: BaseException, run: str, rank: int, cell: str) -> Failure:
    """``error`` as the kernel needs it: its frames from the cell (compiled as the file ``cell``) inwards."""
    tb = _from_cell(error.__traceback__, cell)
    frames = traceback.extract_tb(tb)
    return Failure(
        run=run,
        rank=rank,
        ename=type(error).__name__,
        module=type(error).__module__,
        message=_text(error),
        frames=tuple(
            (
                "<cell>" if frame.filename == cell else frame.filename,
                frame.lineno or 0,
                frame.name,
                frame.line or "",
            )
            for frame in frames
        ),
        traceback="".join(traceback.TracebackException(type(error), error, tb, compact=True).format()),
        aborted=isinstance(error, CollectiveAborted),
        pickled=_pickled(error),
    )


def _from_cell(tb: TracebackType | None, cell: str) -> TracebackType | None:
    """The traceback without our own frames above the cell; as it is when the cell is not in it."""
    walk = tb
    while walk is not None:
        if walk.tb_frame.f_code.co_filename == cell:
            return walk
        walk = walk.tb_next
    return tb


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as trouble:
        return f"<its message cannot be shown: {type(trouble).__name__}>"


def _pickled(error: BaseException) -> str:
    try:
        data: bytes = cloudpickle.dumps(error)
    except Exception:
        return ""
    return data.hex() if len(data) <= _PICKLE_LIMIT else ""
