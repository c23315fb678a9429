"""Where this rank is, in Python and in native code: written when SIGUSR1 comes, told when the kernel asks."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import threading
from time import monotonic, sleep

from ring_notebook.core.native import core

_SECONDS_TO_WRITE = 2.0
_PERIOD = 0.01
_END = b"End of native stack"
_file = 2


def register(log: bool) -> None:
    """Write the calls of the main thread when SIGUSR1 comes: to standard error where that is a log, else to a file.

    The main thread alone: to walk the frames of threads that run may crash the process.
    """
    global _file
    if not log:
        with tempfile.TemporaryFile() as own:
            _file = os.dup(own.fileno())
    faulthandler.register(signal.SIGUSR1, _file, all_threads=False)
    core.report_native_stack(signal.SIGUSR1, _file)


def tell() -> str:
    """What is written now, for a kernel that sees no log of this rank. Called beside the cell that runs.

    Where nothing is, because the cell has a handler of its own for SIGUSR1 or the disk is full, Python's calls alone.
    """
    before = os.fstat(_file).st_size
    os.kill(os.getpid(), signal.SIGUSR1)
    deadline = monotonic() + _SECONDS_TO_WRITE
    written = b""
    while _END not in written and monotonic() < deadline:
        sleep(_PERIOD)
        written = os.pread(_file, os.fstat(_file).st_size - before, before)
    return written.decode(errors="replace") if _END in written else _python_stack()


def _python_stack() -> str:
    """The calls of the main thread, in the words of what is written else."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = ["Stack (most recent call first):"]
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join([*lines, "Native stack (most recent call first):", _END.decode(), ""])
