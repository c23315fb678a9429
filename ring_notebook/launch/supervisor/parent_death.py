"""Runs a program that ends when the process that started it dies.

``python parent_death.py PARENT PROGRAM ARGS...``: a launcher killed with SIGKILL cannot stop what it started, and
the Linux kernel can. Where a sandbox refuses that call, a process that looks ten times a second takes its place. The
file imports nothing of ours, so that a bare interpreter runs it by its path.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PERIOD = 0.1  # seconds
# Loaded here and not between fork and exec, where another thread may have held the loader's lock.
_LIBC = ctypes.CDLL(None, use_errno=True)


def wrap(command: list[str]) -> list[str]:
    """``command`` so that it gets SIGTERM when this process dies, however it dies."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def bind_to_parent(parent: int, sig: signal.Signals = signal.SIGTERM) -> None:
    """Have ``sig`` sent to this process when ``parent``, which started it, dies. Exits if it already has."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(sig)) != 0:
        _start_watcher(parent, sig)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, has exited")


def _start_watcher(parent: int, sig: signal.Signals) -> None:
    """Start a process that sends ``sig`` to this one when ``parent`` dies, and ends with this one."""
    watched = os.getpid()
    if first := os.fork():
        os.waitpid(first, 0)
        return
    try:
        if os.fork() == 0:  # no child of the program, which may wait for all that it has
            os.setpgid(0, 0)  # a signal to the program's group is not for this one
            for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(signum, signal.SIG_DFL)
            os.closerange(0, 1 << 16)
            began = _life(watched)[1]
            while (life := _life(watched)) == (parent, began):
                time.sleep(_PERIOD)
            if life[1] == began:
                os.kill(watched, sig)
    finally:
        os._exit(0)


def _life(pid: int) -> tuple[int, int]:
    """The parent of process ``pid``, and when it began; zeros where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0, 0
    return int(words[1]), int(words[19])


def main() -> None:
    """Entry point of the process between launcher and program; becomes the program."""
    bind_to_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
