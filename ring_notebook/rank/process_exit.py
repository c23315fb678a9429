"""Tells the other ranks and the launcher of an uncaught exception or an exit code before exit handlers wait for others.

MPI_Finalize is such a handler, which waits for all ranks. Python shows an uncaught exception to `sys.excepthook`, and
an exit code to nobody, so `sys.exit` is replaced: its exception notices when the interpreter itself reads the code.
"""

from __future__ import annotations

import builtins
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ring_notebook.rank.rank_status import exit_code_of, report_error

__all__ = ["watch_exits"]

_Tell = Callable[[BaseException], None]


def watch_exits(tell: _Tell) -> None:
    """Have ``tell`` called with the exception that ends this process: uncaught, or SystemExit unless it means success.

    A `SystemExit` that a program raises itself, without `sys.exit`, `exit` or `quit`, is not seen.
    """

    def report(error: BaseException) -> None:
        report_error(error)
        tell(error)

    _watch_exceptions(report)
    _watch_exit_codes(report)


def _watch_exceptions(report: _Tell) -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        report(error)
        before(kind, error, traceback)

    sys.excepthook = hook


def _watch_exit_codes(report: _Tell) -> None:
    process, original = os.getpid(), sys.exit

    class WatchedExit(SystemExit):
        """Reports itself when the interpreter reads its code, which it does from no frame, to exit with it."""

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "code" and _is_outermost(2) and exit_code_of(self) and os.getpid() == process:
                report(self)
            return value

        def __reduce__(self) -> tuple[type[SystemExit], tuple[object, ...]]:
            return SystemExit, self.args

    WatchedExit.__module__, WatchedExit.__name__, WatchedExit.__qualname__ = "builtins", "SystemExit", "SystemExit"

    def exit_watched(*status: object) -> None:
        # Of other threads it ends the thread alone, which Python knows by the exact type.
        if len(status) > 1 or threading.current_thread() is not threading.main_thread():
            original(*status)  # type: ignore[arg-type]
        raise WatchedExit(*status)

    for name in ("exit", "quit"):
        if hasattr(builtins, name):  # not where Python runs without `site`
            setattr(builtins, name, exit_watched)
    for name, value in list(vars(sys.modules["__main__"]).items()):
        if value is original:  # from sys import exit
            setattr(sys.modules["__main__"], name, exit_watched)
    setattr(sys, "exit", exit_watched)  # noqa: B010 - the declared type says that it never returns


def _is_outermost(depth: int) -> bool:
    """Whether the caller ``depth`` levels up, this function being level 0, does not exist."""
    try:
        sys._getframe(depth)
    except ValueError:
        return True
    return False
