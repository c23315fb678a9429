"""`breakpoint()` in a cell: pdb in the frame that called it, whose commands the user types in the notebook.

The other ranks continue until they need this one, and wait for it then.
"""

from __future__ import annotations

import io
import os
import pdb
import sys
from types import FrameType
from typing import Any

from ring_notebook.engine.debugging.cell_pdb import CellPdb, begins_cell
from ring_notebook.engine.debugging.dialogue import ask, release

__all__ = ["install", "stop"]

# Stepping passes over these: a user's next line is meant to be one of the user's.
_PASSED_OVER = ["ring_notebook", "ring_notebook.*", "IPython.*"]


def install() -> None:
    """Make `breakpoint()` and `pdb.set_trace()` open this debugger."""
    sys.breakpointhook = _on_breakpoint
    pdb.set_trace = _set_trace


def _on_breakpoint(*args: Any, **kwargs: Any) -> Any:
    if os.environ.get("PYTHONBREAKPOINT"):  # the user has chosen another debugger, or with 0 none
        return sys.__breakpointhook__(*args, **kwargs)
    return _LiveDebugger().set_trace(sys._getframe(1))


def _set_trace(**_: Any) -> None:
    _LiveDebugger().set_trace(sys._getframe(1))


def stop() -> None:
    """Stop to trace, if a debugger does: the cell has ended, and what follows is no code of the user."""
    if _traces():
        sys.settrace(None)
        release()


def _traces() -> bool:
    return isinstance(getattr(sys.gettrace(), "__self__", None), _LiveDebugger)


class _Terminal(io.StringIO):
    """What pdb writes to and reads from: to read a line is to ask the user, after what was written since."""

    prompt = ""

    def readline(self, _size: int = -1, /) -> str:  # type: ignore[override]
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        try:
            return ask(self.prompt, text=text.removesuffix(self.prompt), kind="pdb") + "\n"
        except EOFError:
            return "q\n"


class _LiveDebugger(CellPdb):
    """pdb over a cell that runs."""

    def __init__(self) -> None:
        terminal = _Terminal()
        super().__init__(stdin=terminal, stdout=terminal, nosigint=True, readrc=False, skip=_PASSED_OVER)
        terminal.prompt = self.prompt
        self._quits = False

    def set_trace(self, frame: FrameType | None = None, **more: Any) -> None:
        super().set_trace(frame, **more)
        # What called the cell is not the user's: neither shown by `where` nor traced.
        while frame is not None and not begins_cell(frame):
            frame = frame.f_back
        if frame is not None:
            self.botframe = frame
            while (frame := frame.f_back) is not None:
                frame.f_trace = None

    def stop_here(self, frame: FrameType) -> bool:
        return super().stop_here(frame) and _in_cell(frame)

    def user_call(self, frame: FrameType, argument_list: None) -> None:
        if begins_cell(frame):  # the last expression of a cell is called by itself
            self.botframe = frame
        else:
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        if not begins_cell(frame):
            super().user_return(frame, return_value)

    def _cmdloop(self) -> None:
        # pdb's own continues after an interrupt, which is to end the cell.
        self.cmdloop()

    def do_quit(self, arg: str) -> bool:
        """q(uit): stop the cell on every rank, as an interrupt does."""
        self.set_continue()
        self._quits = True
        return True

    do_q = do_exit = do_quit

    def interaction(self, *args: Any) -> None:
        try:
            super().interaction(*args)
        finally:
            if not _traces():
                release()
        if self._quits:
            raise KeyboardInterrupt


def _in_cell(frame: FrameType | None) -> bool:
    while frame is not None and not begins_cell(frame):
        frame = frame.f_back
    return frame is not None
