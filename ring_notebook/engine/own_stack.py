"""The stack of this rank, in Python and in native code: written on SIGUSR1, and sent when the kernel asks."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import threading
from time import monotonic, sleep
from types import FrameType

from ring_notebook.core.native import core

_SECONDS_TO_WRITE = 2.0
_PERIOD = 0.01
_END = b"End of native stack"
_file = 2


def register(log: int | None) -> None:
    """Write the stack of the main thread on SIGUSR1: to ``log``, or to a file without a name.

    Only the main thread's: walking the frames of running threads may crash the process.
    """
    global _file
    if log is None:
        with tempfile.TemporaryFile() as own:
            log = os.dup(own.fileno())
    _file = log
    faulthandler.register(signal.SIGUSR1, _file, all_threads=False)
    core.report_native_stack(signal.SIGUSR1, _file)


def tell() -> str:
    """The stack now, for a kernel that cannot read this rank's log. Called while the cell runs.

    Only the Python stack where SIGUSR1 writes nothing: the cell has a handler of its own, or the disk is full.
    """
    before = os.fstat(_file).st_size
    os.kill(os.getpid(), signal.SIGUSR1)
    deadline = monotonic() + _SECONDS_TO_WRITE
    written = b""
    while _END not in written and monotonic() < deadline:
        sleep(_PERIOD)
        written = os.pread(_file, os.fstat(_file).st_size - before, before)
    return written.decode(errors="replace") if _END in written else _python_stack()


def main_frames() -> list[FrameType]:
    """The frames of the main thread, the innermost first; any thread may call it."""
    return core.frames_of_thread(threading.main_thread().ident or 0)


def _python_stack() -> str:
    lines = [
        f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
        for frame in main_frames()
    ]
    return "\n".join(
        ["Stack (most recent call first):", *lines, "Native stack (most recent call first):", _END.decode(), ""]
    )
