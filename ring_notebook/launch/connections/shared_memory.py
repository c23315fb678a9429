"""Removes the files that MPICH leaves in /dev/shm when its ranks are killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

__all__ = ["FOLDER", "Cleaner"]

FOLDER = Path("/dev/shm")


class Cleaner:
    """A process that outlives this one, however this one dies, and then removes all that begins with ``prefixes``.

    Before, it calls ``at_death`` unless this process has called `close`. Create it before this process has threads.
    """

    def __init__(self, prefixes: tuple[str, ...], at_death: Callable[[], None] | None = None) -> None:
        ends, self._alive = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _clean_at_end(ends, prefixes, at_death)
            finally:
                os._exit(0)
        os.close(ends)

    def close(self) -> None:
        """Have the files removed now, and return when they are."""
        with contextlib.suppress(OSError):  # it has been killed
            os.write(self._alive, b"c")
        os.close(self._alive)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _clean_at_end(ends: int, prefixes: tuple[str, ...], at_death: Callable[[], None] | None) -> None:
    # A session of its own: signals to the job's process group are not meant for it.
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    os.dup2(ends, 0)
    os.closerange(1, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 16 else 1 << 16)
    # Ends with a byte from `close`, or when the last process that has the other end of the pipe has exited.
    if not os.read(0, 1) and at_death is not None:
        at_death()
    for path in FOLDER.iterdir():
        if path.name.startswith(prefixes):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()
