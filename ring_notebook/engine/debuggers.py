"""pdb on a rank: in a running cell (`breakpoint()`) and after the exception that ended the last cell.

The user types the commands in the notebook. While a cell is debugged the other ranks continue until they need this one,
and then wait for it.
"""

from __future__ import annotations

import io
import os
import pdb
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from pdb import Pdb
from types import FrameType, TracebackType
from typing import Any

from ring_notebook.core import world
from ring_notebook.engine.dialogue import ask, no_questions, release
from ring_notebook.engine.interrupt import Interruptible
from ring_notebook.files.private_files import open_regular
from ring_notebook.rank.named_interrupt import DEBUGGER
from ring_notebook.text.error_text import CELL, error_text, printable


def _begins_cell(frame: FrameType) -> bool:
    """Whether the frame is that of a cell itself, and not of a function."""
    return frame.f_code.co_name == "<module>" and CELL.fullmatch(frame.f_code.co_filename) is not None


_MOST_RC = 1 << 20  # bytes
_MOST_OF_LINE = 200  # characters
# They would move the prompt, or read more lines than the one.
_NOT_IN_RC = {
    *("continue", "step", "next", "return", "until", "jump", "quit", "EOF", "run", "up", "down", "exceptions"),
    *("interact", "debug", "commands"),
}


class _CellPdb(Pdb):
    """pdb whose stack says ``Cell(3)inner()`` for a line of a cell, and which takes the user's ``~/.pdbrc``.

    Not that of the working directory, whose files others may write.
    """

    def __init__(self, terminal: io.StringIO, **options: Any) -> None:
        super().__init__(stdout=terminal, nosigint=True, readrc=False, **options)
        self._rc: list[str] | None = None

    def execute_rc(self) -> None:
        """Execute the lines of ``~/.pdbrc``, the first time; what is wrong with one of them is written."""
        if self._rc is not None:
            return
        self._rc = []
        own, self.stdin = self.stdin, io.StringIO()
        try:
            with suppress(FileNotFoundError), open_regular(Path("~/.pdbrc").expanduser()) as file:
                self._rc = file.read(_MOST_RC).decode(errors="replace").splitlines()
        except (OSError, ValueError, RuntimeError) as error:  # no file, or no home
            self._write_of_rc(error_text(error))
        try:
            with no_questions():
                for line in self._rc:
                    self._execute_of_rc(line.strip())
        finally:
            self.stdin = own

    def _execute_of_rc(self, line: str) -> None:
        command = getattr(self, f"do_{self.parseline(line)[0]}", None) if line else None
        if not line or line.startswith("#"):
            return
        if getattr(command, "__name__", "").removeprefix("do_") in _NOT_IN_RC:
            self._write_of_rc(f"left out, it would move or ask: {line}")
            return
        try:
            self.onecmd(line)
        except Exception as error:
            self._write_of_rc(f"{type(error).__name__}: {error_text(error)}: {line}")

    def _write_of_rc(self, what: str) -> None:
        self.message(f"*** ~/.pdbrc: {printable(what, _MOST_OF_LINE)}")

    def format_stack_entry(self, frame_lineno: Any, lprefix: str = ": ") -> str:
        return CELL.sub("Cell", super().format_stack_entry(frame_lineno, lprefix), count=1)


# Stepping skips these, so that the next line is always one of the user's.
_PASSED_OVER = ["ring_notebook", "ring_notebook.*", "IPython.*", "bdb", "pdb"]


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


def break_in_cell() -> None:
    """Open this debugger at the next line of the innermost function of the cell that is being executed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not CELL.fullmatch(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is not None:
        debugger = _LiveDebugger()
        debugger.set_trace(frame)
        debugger.set_next(frame)


def stop() -> None:
    """Stop tracing, if a debugger traces: the cell has ended, and our code follows."""
    if _traces():
        sys.settrace(None)
        release()


def _traces() -> bool:
    return isinstance(getattr(sys.gettrace(), "__self__", None), _LiveDebugger)


class _Terminal(io.StringIO):
    """The stream of pdb: reading a line shows the text written since the last one, and asks the user."""

    prompt = ""

    def readline(self, _size: int = -1, /) -> str:  # type: ignore[override]
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        try:
            return ask(self.prompt, text=text.removesuffix(self.prompt), kind="pdb") + "\n"
        except EOFError:
            return "q\n"


class _LiveDebugger(_CellPdb):
    """pdb in a running cell."""

    def __init__(self) -> None:
        terminal = _Terminal()
        super().__init__(terminal, stdin=terminal, skip=_PASSED_OVER)
        terminal.prompt = self.prompt
        self._quits = False

    def set_trace(self, frame: FrameType | None = None, **more: Any) -> None:
        super().set_trace(frame, **more)
        # The callers of the cell are not the user's code: neither shown by `where` nor traced.
        while frame is not None and not _begins_cell(frame):
            frame = frame.f_back
        if frame is not None:
            self.botframe = frame
            while (frame := frame.f_back) is not None:
                frame.f_trace = None

    def stop_here(self, frame: FrameType) -> bool:
        return super().stop_here(frame) and _in_cell(frame)

    def user_call(self, frame: FrameType, argument_list: None) -> None:
        if _begins_cell(frame):  # the last expression of a cell is a call of its own
            self.botframe = frame
        else:
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        if not _begins_cell(frame):
            super().user_return(frame, return_value)

    def setup(self, f: FrameType | None, tb: TracebackType | None) -> Any:
        super().setup(f, tb)
        self.execute_rc()

    def _cmdloop(self) -> None:
        # pdb's own loop continues after an interrupt, but an interrupt must end the cell.
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
    while frame is not None and not _begins_cell(frame):
        frame = frame.f_back
    return frame is not None


_MOST_TEXT = 100_000  # characters of one answer

_traceback: TracebackType | None = None


_debugger: _PostMortem | None = None


def keep_frames(traceback: TracebackType | None) -> None:
    """Keep the frames, with all objects in their variables, until `forget_frames`."""
    global _traceback
    _traceback = traceback


def forget_frames() -> bool:
    """Release the frames when another cell begins. Returns whether there were any."""
    global _traceback, _debugger
    kept = _traceback is not None
    _traceback = _debugger = None
    return kept


def answer(command: str) -> tuple[str, bool]:
    """The output of pdb for ``command``, and whether it takes another; the first one begins in the frame that raised.

    An empty command shows the frame. Raises LookupError where no cell has left an exception. Can be interrupted.
    """
    global _debugger
    if _traceback is None:
        raise LookupError(f"rank {world.prepare_host().topology.rank}: its last cell has left no exception to debug")
    if _debugger is None:
        _debugger = _PostMortem(_traceback)
    text, goes_on = _debugger.answer(command)
    if not goes_on:
        _debugger = None
    return printable(text, _MOST_TEXT), goes_on


class _PostMortem(_CellPdb):
    """pdb in the frames of an exception, with one call for each command."""

    def __init__(self, traceback: TracebackType) -> None:
        self._text = io.StringIO()
        super().__init__(self._text, stdin=io.StringIO())
        self.reset()
        self.setup(None, traceback)

    def answer(self, command: str) -> tuple[str, bool]:
        """The output of one command, and whether pdb continues after it."""
        self._text.seek(0)
        self._text.truncate()
        ended = False

        def carry_out() -> None:
            nonlocal ended
            self.execute_rc()
            if command.strip():
                ended = bool(self.onecmd(self.precmd(command)))
            else:
                self.print_stack_entry(self.stack[self.curindex])

        with redirect_stdout(self._text), redirect_stderr(self._text), Interruptible(DEBUGGER) as interruptible:
            error = interruptible.call(carry_out)
        if isinstance(error, KeyboardInterrupt):
            self._text.write("interrupted\n")
        elif error is not None:
            ended = True  # pdb ends by BdbQuit
        return self._text.getvalue(), not ended
