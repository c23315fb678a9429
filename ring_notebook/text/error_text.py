"""The text of an exception that a cell raised: bounded and valid UTF-8, whatever its class does."""

from __future__ import annotations

import re

MOST = 10_000  # characters
CELL = re.compile(r"<cell of run (?P<run>[^>]*)>")
"""The file of a cell's code, as Python sees it."""
# How tracebacks, faulthandler and `warnings` write a line of a cell.
_PLACE = re.compile(rf'(?:File ")?{CELL.pattern}(?:", line |:)(?P<line>\d+)')


def cell_file(run: str) -> str:
    """The file of the code of a run's cell: ``<cell of run ID>``."""
    return f"<cell of run {run}>"


def name_cells(text: str) -> str:
    """The same text with lines of cells named as a notebook does: ``Cell, line 3``."""
    return _PLACE.sub(r"Cell, line \g<line>", text)


def error_text(error: BaseException) -> str:
    """``str(error)``, shortened; if that raises, the type of what it raised."""
    try:
        return printable(str(error))
    except BaseException as trouble:
        return f"<its message cannot be shown: {type(trouble).__name__} in __str__>"


_WITHIN = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)")


def cause_text(error: BaseException) -> str:
    """``ClassName: text``, in one line; for an error with a callback's traceback in it, the callback's exception."""
    text = error_text(error)
    if within := _WITHIN.findall(text):
        return str(within[-1])
    text = " ".join(text.split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def printable(text: str, most: int = MOST) -> str:
    """``text`` with escapes for what UTF-8 cannot encode; a long text keeps its beginning and its end."""
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half:,} characters left out]\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()
