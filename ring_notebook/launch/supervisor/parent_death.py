"""Runs a program that ends when the process that started it dies.

``python parent_death.py PARENT PROGRAM ARGS...``: a launcher killed with SIGKILL cannot stop what it started, and
the Linux kernel can. The file imports nothing of ours, so that a bare interpreter runs it by its path.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Loaded here and not between fork and exec, where another thread may have held the loader's lock.
_LIBC = ctypes.CDLL(None, use_errno=True)


def wrap(command: list[str]) -> list[str]:
    """``command`` so that it gets SIGTERM when this process dies, however it dies."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def bind_to_parent(parent: int, sig: signal.Signals = signal.SIGTERM) -> None:
    """Have ``sig`` sent to this process when ``parent``, which started it, dies. Exits if it already has."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(sig)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, has exited")


def main() -> None:
    """Entry point of the process between launcher and program; becomes the program."""
    bind_to_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
