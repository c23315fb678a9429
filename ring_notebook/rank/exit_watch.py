"""Tells the other ranks and the launcher of an uncaught exception or an exit code before exit handlers wait for others.

MPI_Finalize is such a handler, which waits for all ranks. Python shows an uncaught exception to `sys.excepthook`, and
an exit code to nobody, so `sys.exit` is replaced: its exception notices when the interpreter itself reads the code.

A process that a rank forks is no rank: it ends with the user's code, reports nothing and runs no exit handler of ours.
"""

from __future__ import annotations

import atexit
import builtins
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

from ring_notebook.rank.rank_status import exit_code_of, report_error

_Tell = Callable[[BaseException], None]
_tell_others: _Tell | None = None  # what `watch_exits` was given


def at_exit(handler: Callable[..., object], *arguments: object) -> None:
    """Call ``handler`` when this process exits, as `atexit` does, but not in processes that it forks."""
    process = os.getpid()

    def handle() -> None:
        if os.getpid() == process:
            handler(*arguments)

    atexit.register(handle)


class EndingForks:
    """A context that only the process that entered it leaves: processes forked inside end there.

    They end as a program does, with an exit code and, after an exception, a traceback, but without exit handlers.
    """

    # No generator: contextlib sets an attribute of the exception that leaves the block, which a user's may refuse.
    def __enter__(self) -> None:
        self._process = os.getpid()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if os.getpid() != self._process:
            _end(error)


def _end(error: BaseException | None) -> NoReturn:
    code = 0 if error is None else exit_code_of(error)
    with suppress(BaseException):  # of the user's streams, and of the error's own text
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        elif code and not isinstance(error.code, int):  # type: ignore[union-attr]
            print(error.code, file=sys.stderr)  # type: ignore[union-attr] # noqa: T201 - as Python does
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    os._exit(code)


def watch_exits(tell_others: _Tell) -> None:
    """Call ``tell_others`` with the error that ends this process: an uncaught exception, or an exit code other than 0.

    A `SystemExit` that a program raises itself, without `sys.exit`, `exit` or `quit`, is not seen. Forked processes
    report nothing.
    """
    global _tell_others
    _tell_others = tell_others
    process = os.getpid()

    def report(error: BaseException) -> None:
        if os.getpid() == process:
            tell(error)

    _watch_exceptions(report)
    _watch_exit_codes(report)


def tell(error: BaseException) -> None:
    """Tell the launcher, and the other ranks where this one has joined them, that ``error`` ends this rank."""
    report_error(error)
    if _tell_others is not None:
        _tell_others(error)


def _watch_exceptions(report: _Tell) -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        report(error)
        before(kind, error, tb)

    sys.excepthook = hook


def _watch_exit_codes(report: _Tell) -> None:
    original = sys.exit

    class WatchedExit(SystemExit):
        """Reports itself when the interpreter reads its code to exit, which it does from no frame."""

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "code" and _is_outermost(2) and exit_code_of(self):
                report(self)
            return value

        def __reduce__(self) -> tuple[type[SystemExit], tuple[object, ...]]:
            return SystemExit, self.args

    WatchedExit.__module__, WatchedExit.__name__, WatchedExit.__qualname__ = "builtins", "SystemExit", "SystemExit"

    def exit_watched(*status: object) -> None:
        # In other threads SystemExit ends only the thread, and Python checks for the exact type.
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
