"""Restores what a failed cell may leave changed, ends its processes, and holds back what the engine needs itself.

An interrupt may come between the line that changes a state and the line that restores it, in a library or a cell. The
user's own objects are not changed.
"""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from ring_notebook.engine import namespace

# Libraries set this one once and rely on it in later cells: data loaders notice dead workers with it.
_OF_LIBRARIES = {signal.SIGCHLD}


class ProcessState:
    """The state of the process and this thread when the object is made."""

    def __init__(self) -> None:
        self._tracing = sys.gettrace(), sys.getprofile()
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals() - _OF_LIBRARIES}
        self._warnings = warnings.filters, list(warnings.filters), warnings.showwarning
        self._folder = _folder()
        self._modes = namespace.modes()

    def put_back(self) -> list[str]:
        """Restore what has changed; returns descriptions of it."""
        return [
            *filter(None, [self._put_back_tracing(), self._put_back_handlers(), self._put_back_warnings()]),
            *filter(None, [self._put_back_folder()]),
            *(name for put_back in self._modes for name in put_back()),
        ]

    def _put_back_tracing(self) -> str:
        if (sys.gettrace(), sys.getprofile()) == self._tracing:
            return ""
        sys.settrace(self._tracing[0])
        sys.setprofile(self._tracing[1])
        return "the trace function"

    def _put_back_handlers(self) -> str:
        """Restore handlers that Python has set; it cannot restore others, such as ours for stacks."""
        changed = [
            number
            for number, handler in self._handlers.items()
            if handler is not None and signal.getsignal(number) is not handler
        ]
        for number in changed:
            if number == signal.SIGALRM:  # a pending alarm could end the engine under the restored handler
                signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(number, self._handlers[number])
        return f"handlers of {', '.join(signal.Signals(number).name for number in changed)}" if changed else ""

    def _put_back_warnings(self) -> str:
        """Restore the filters, but keep new ones that name a message or a module: libraries add those when imported."""
        filters, before, show = self._warnings
        now = list(warnings.filters)
        wanted = [*(one for one in now if one not in before and (one[1] or one[3])), *before]
        if warnings.filters is filters and set(now) == set(wanted) and warnings.showwarning is show:
            return ""
        warnings.resetwarnings()  # tells Python that the filters change
        warnings.filters, warnings.showwarning = filters, show
        cast("list[Any]", filters)[:] = wanted
        return "the warnings filters"

    def _put_back_folder(self) -> str:
        if not self._folder or _folder():
            return ""
        for folder in (Path(self._folder), *Path(self._folder).parents):
            with suppress(OSError):
                os.chdir(folder)
                return f"the current folder, which is gone ({folder} now)"
        return ""


def _folder() -> str:
    """The current folder; empty if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


_SECONDS_TO_TERMINATE = 0.5


def end_children(kept: Iterable[BaseProcess]) -> None:
    """End all multiprocessing children except ``kept``: a data loader would wait 5 s for a busy worker.

    Returns when they have ended.
    """
    left = [child for child in multiprocessing.active_children() if child not in set(kept)]
    if not left:
        return
    # A data loader's handler would raise here because its worker was killed.
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        for child in left:
            child.terminate()
        for child in left:
            child.join(_SECONDS_TO_TERMINATE)
            if child.is_alive():
                child.kill()
                child.join()
    finally:
        signal.signal(signal.SIGCHLD, before)


_DESCRIPTORS = 16  # libzmq ends its process when it cannot open a socket
_BYTES = 32 << 20  # of address space, which may be limited: a thread takes 8 MiB. Never written to


class HeldBack:
    """A context that reserves descriptors and address space, which a cell then cannot use up, and the engine's loop.

    After the block they are free, so that the engine can record how the cell ended, and uncaught exceptions are shown
    again. A cell that would stop the loop on which the engine runs, and with it the engine, gets an error.
    """

    # Not a generator: contextlib sets an attribute of the exception that leaves the block, which may refuse that.
    def __enter__(self) -> None:
        self._descriptors: list[int] = []
        self._memory: list[mmap.mmap] = []
        self._of_loop: dict[str, Any] = getattr(asyncio._get_running_loop(), "__dict__", {})
        self._of_loop["stop"] = _refuse_to_stop
        with suppress(OSError, MemoryError):  # earlier cells may have used up the rest
            self._memory.append(mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ))
            while len(self._descriptors) < _DESCRIPTORS:
                self._descriptors.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def __exit__(self, *_: object) -> None:
        self._of_loop.pop("stop", None)
        if sys.excepthook is None:  # no thread starts without one
            sys.excepthook = sys.__excepthook__
        for one in self._memory:
            one.close()
        for descriptor in self._descriptors:
            with suppress(OSError):  # the cell has closed a descriptor that is not its own
                os.close(descriptor)


def _refuse_to_stop() -> None:
    raise RuntimeError(
        "stop: this event loop runs the engine, which would end with it; stop one that the cell has made with "
        "asyncio.new_event_loop(), or use `await`"
    )
