"""pdb over the frames of the exception that ended this rank's last cell, one command at a time."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from types import TracebackType

from ring_notebook.core import world
from ring_notebook.engine.debugging.cell_pdb import CellPdb
from ring_notebook.engine.debugging.interrupt import Interruptible
from ring_notebook.error_text import printable

__all__ = ["answer", "forget", "keep"]

_MOST_TEXT = 100_000  # characters of one answer

_traceback: TracebackType | None = None
_debugger: _Debugger | None = None


def keep(traceback: TracebackType | None) -> None:
    """Keep the frames, and with them all that their variables hold, until `forget`."""
    global _traceback
    _traceback = traceback


def forget() -> None:
    """Let go of the frames: another cell begins."""
    global _traceback, _debugger
    _traceback = _debugger = None


def answer(command: str) -> tuple[str, bool]:
    """What pdb says to ``command``, and whether it takes another; the first one begins in the frame that raised.

    An empty command shows the frame. Raises LookupError where no cell has left an exception. Interruptible.
    """
    global _debugger
    if _traceback is None:
        raise LookupError(f"rank {world.prepare_host().topology.rank}: its last cell has left no exception to debug")
    if _debugger is None:
        _debugger = _Debugger(_traceback)
    text, goes_on = _debugger.answer(command)
    if not goes_on:
        _debugger = None
    return printable(text, _MOST_TEXT), goes_on


class _Debugger(CellPdb):
    """pdb whose commands arrive one by one."""

    def __init__(self, traceback: TracebackType) -> None:
        self._text = io.StringIO()
        super().__init__(stdin=io.StringIO(), stdout=self._text, nosigint=True, readrc=False)
        self.reset()
        self.setup(None, traceback)

    def answer(self, command: str) -> tuple[str, bool]:
        """The text of one command, and whether pdb continues after it."""
        self._text.seek(0)
        self._text.truncate()
        ended = False

        def carry_out() -> None:
            nonlocal ended
            if command.strip():
                ended = bool(self.onecmd(self.precmd(command)))
            else:
                self.print_stack_entry(self.stack[self.curindex])

        with redirect_stdout(self._text), redirect_stderr(self._text), Interruptible() as interruptible:
            error = interruptible.call(carry_out)
        if isinstance(error, KeyboardInterrupt):
            self._text.write("interrupted\n")
        elif error is not None:
            ended = True  # pdb's own way to end: BdbQuit
        return self._text.getvalue(), not ended
