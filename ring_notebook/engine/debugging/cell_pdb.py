"""pdb that calls a cell by that name, as both debuggers of a rank do."""

from __future__ import annotations

import re
from pdb import Pdb
from types import FrameType
from typing import Any

__all__ = ["CellPdb", "begins_cell"]

_CELL = re.compile(r"<cell of run [^>]*>")


def begins_cell(frame: FrameType) -> bool:
    """Whether the frame is that of a cell itself, and not of a function."""
    return frame.f_code.co_name == "<module>" and _CELL.fullmatch(frame.f_code.co_filename) is not None


class CellPdb(Pdb):
    """pdb whose stack says ``Cell(3)inner()`` for a line of a cell."""

    def format_stack_entry(self, frame_lineno: Any, lprefix: str = ": ") -> str:
        return _CELL.sub("Cell", super().format_stack_entry(frame_lineno, lprefix), count=1)
