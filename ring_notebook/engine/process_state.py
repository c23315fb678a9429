"""What a cell may leave behind or use up: changed state and processes after a bad end, descriptors and memory.

An interrupt may come between the line that changes such a state and the one that would have put it back, in a library
as in a cell. What the user's own objects hold is left as it is.
"""

from __future__ import annotations

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

# Libraries set this one once, and rely on it in later cells: loaders of batches learn of dead workers by it.
_OF_LIBRARIES = {signal.SIGCHLD}


class ProcessState:
    """The state when this object is made, in the thread that makes it."""

    def __init__(self) -> None:
        self._tracing = sys.gettrace(), sys.getprofile()
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals() - _OF_LIBRARIES}
        self._warnings = warnings.filters, list(warnings.filters), warnings.showwarning
        self._folder = _folder()
        self._modes = namespace.modes()

    def put_back(self) -> list[str]:
        """Put back what has changed; returns what that is, in words."""
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
        """Handlers that Python has not set, such as ours for stacks, cannot be set by it again."""
        changed = [
            number
            for number, handler in self._handlers.items()
            if handler is not None and signal.getsignal(number) is not handler
        ]
        for number in changed:
            if number == signal.SIGALRM:  # it would end the engine where that is what it did before
                signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(number, self._handlers[number])
        return f"handlers of {', '.join(signal.Signals(number).name for number in changed)}" if changed else ""

    def _put_back_warnings(self) -> str:
        """Filters that were added and name a message or a module stay: libraries add such ones when imported."""
        filters, before, show = self._warnings
        now = list(warnings.filters)
        wanted = [*(one for one in now if one not in before and (one[1] or one[3])), *before]
        if warnings.filters is filters and set(now) == set(wanted) and warnings.showwarning is show:
            return ""
        warnings.resetwarnings()  # tells Python that they change
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
    """The current folder; empty where it is gone."""
    try:
        return os.getcwd()
    except OSError:
        return ""


_SECONDS_TO_TERMINATE = 0.5


def end_children(kept: Iterable[BaseProcess]) -> None:
    """End all multiprocessing children but ``kept``: a data loader would wait 5 s for a worker that is busy.

    Returns when they are gone.
    """
    left = [child for child in multiprocessing.active_children() if child not in set(kept)]
    if not left:
        return
    # A data loader's handler would raise here that its worker was killed.
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
_BYTES = 32 << 20  # of an address space that may be limited: a thread takes 8 MiB. Nobody writes there


class HeldBack:
    """What an engine needs to record how a cell ended that has used up all descriptors or memory.

    While the block runs it cannot have these; afterwards they are free.
    """

    # No generator: contextlib sets an attribute of the exception that leaves the block, which a user's may refuse.
    def __enter__(self) -> None:
        self._descriptors: list[int] = []
        self._memory: list[mmap.mmap] = []
        with suppress(OSError, MemoryError):  # earlier cells may hold all that is left
            self._memory.append(mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ))
            while len(self._descriptors) < _DESCRIPTORS:
                self._descriptors.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def __exit__(self, *_: object) -> None:
        for one in self._memory:
            one.close()
        for descriptor in self._descriptors:
            with suppress(OSError):  # the cell has closed what is not its own
                os.close(descriptor)
