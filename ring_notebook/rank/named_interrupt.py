"""Interrupts that name their target, such as a run: a late one does not end what follows the target.

A rank writes what it executes to the beginning of its status file. The sender of an interrupt locks that file, compares
the name, and sends the signal. The rank takes the same lock before it executes something else.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ring_notebook.rank.rank_status import LONGEST_NAME

DEBUGGER = "debugger"
"""The name of each command of a debugger after a cell."""
_IDLE = "-"
_SECONDS_TO_LOCK = 1.0  # the other side holds the lock for microseconds, unless it is stopped
_own: int | None = None  # the open status file of this rank


def tell_executions(path: str) -> None:
    """From now on this process tells in its status file at ``path`` what it executes, if there is one."""
    global _own
    with suppress(OSError):
        _own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        tell_execution("")


def tell_execution(name: str) -> None:
    """Tell that this rank executes ``name`` now, nothing if empty. No interrupt of what it executed before follows."""
    if _own is not None:
        with _locked(_own):
            os.pwrite(_own, (name or _IDLE).encode().ljust(LONGEST_NAME, b"\0"), 0)


def interrupt(pid: int, path: str, name: str) -> None:
    """Send SIGINT to the rank in the process ``pid``, unless its status file at ``path`` tells that ``name`` is over.

    A rank that tells nothing is interrupted in any case. Raises ProcessLookupError when the process has ended.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        os.kill(pid, signal.SIGINT)
        return
    try:
        with _locked(file):
            if os.pread(file, LONGEST_NAME, 0).rstrip(b"\0").decode(errors="replace") in (name, ""):
                os.kill(pid, signal.SIGINT)
    finally:
        os.close(file)


@contextmanager
def _locked(file: int) -> Iterator[None]:
    """Hold the lock on ``file``; without it where the other side holds it for too long, or there are no locks."""
    deadline = time.monotonic() + _SECONDS_TO_LOCK
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                break
            time.sleep(0.0005)
        except OSError:
            break
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
