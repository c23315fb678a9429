"""A debugger as far as a job notices one: it attaches to a process with ptrace, stops it, lets it go on, detaches."""

from __future__ import annotations

import ctypes
import os
import signal
from types import TracebackType

__all__ = ["Debugger"]

_CONT, _ATTACH, _DETACH, _SEIZE, _INTERRUPT = 7, 16, 17, 0x4206, 0x4207
_ALL_THREADS = 0x40000000  # __WALL: threads that are nobody's children too
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


class Debugger:
    """Attached to all threads of process ``pid``, which are stopped, until `detach`; one thread must make all calls.

    ``seizes``: it attaches as strace does, without a SIGSTOP; else as gdb does.
    """

    def __init__(self, pid: int, seizes: bool = False) -> None:
        self.pid = pid
        self._threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
        for thread in self._threads:
            _ptrace(_SEIZE if seizes else _ATTACH, thread)
            if seizes:
                _ptrace(_INTERRUPT, thread)
            _stopped(thread)

    def continue_(self) -> None:
        """Let it run on, still attached."""
        for thread in self._threads:
            _ptrace(_CONT, thread)

    def stop(self) -> None:
        """Stop it again; only where it has seized."""
        for thread in self._threads:
            _ptrace(_INTERRUPT, thread)
            _stopped(thread)

    def kill(self) -> None:
        """Kill it, as gdb's command of that name, and take note of its end."""
        os.kill(self.pid, signal.SIGKILL)
        for thread in sorted(self._threads, key=self.pid.__eq__):  # the first thread's end is that of the process
            os.waitpid(thread, _ALL_THREADS)
        self._threads.clear()

    def detach(self) -> None:
        """Let go of it, and have it continue."""
        for thread in self._threads:
            _ptrace(_DETACH, thread)
        self._threads.clear()

    def __enter__(self) -> Debugger:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.detach()


def _ptrace(request: int, thread: int) -> None:
    if _libc.ptrace(request, thread, None, None) != 0:
        raise OSError(ctypes.get_errno(), f"ptrace {request:#x} of thread {thread}")


def _stopped(thread: int) -> None:
    _, status = os.waitpid(thread, _ALL_THREADS)
    assert os.WIFSTOPPED(status), f"thread {thread} has ended instead of stopping: {status:#x}"
