"""Whether a process of this host lives, since when, whether it is ending or stopped, its memory; own children."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_EXITING = 0x4  # PF_EXITING of Linux
_STATE, _FLAGS, _BEGAN, _RESIDENT = 0, 6, 19, 1  # words of /proc/PID/stat after the name, and of /proc/PID/statm


def began(pid: int) -> int:
    """When process ``pid`` began, in clock ticks since the machine did; 0 when there is none, or it is a zombie."""
    words = _stat(pid)
    return 0 if words[_STATE] in "ZX" else max(1, int(words[_BEGAN]))


def age(pid: int) -> float:
    """Seconds for which process ``pid`` has lived."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began(pid) / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int, since: int = 0) -> bool:
    """Whether process ``pid`` lives; with ``since``, as `began` gives it, no later process of that number will do."""
    now = began(pid)
    return now != 0 and since in (0, now)


def is_ending(pid: int) -> bool:
    """Whether process ``pid`` has ended, is exiting, or has been sent a signal that it cannot survive."""
    words = _stat(pid)
    return words[_STATE] in "ZX" or bool(int(words[_FLAGS]) & _EXITING) or _is_killed(pid)


def _is_killed(pid: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return True
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(signals >> (signal.SIGKILL - 1) & 1 for signals in pending)


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped process ``pid``."""
    return _stat(pid)[_STATE] in "Tt"


def resident(pid: int) -> int:
    """Bytes of memory that process ``pid`` holds, shared memory included; 0 when it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[_RESIDENT])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def has_children() -> bool:
    """Whether this process has children, those that have ended and were not waited for included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _stat(pid: int) -> list[str]:
    """The words of /proc/PID/stat from the state on; those of a process that has ended when there is none."""
    try:
        # The name in parentheses may contain anything.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ["X"]
