"""How many ranks this host can start: processes, open files and memory; and how large files may be."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

from ring_notebook.errors import RingError

__all__ = ["check_file_size", "too_many_ranks"]

_FILES_PER_RANK = 7
"""Open files of the supervisor: a socket, a status file, two pipes, two process descriptors and a selector."""
_FILES_OF_SUPERVISOR = 24
_THREADS_PER_RANK = 2
"""The rank itself, and the thread that passes its output on."""
_BYTES_PER_RANK = 1 << 20
"""Memory of the smallest program."""
_LEAST_FILE = 16 << 20
"""Bytes of a file below which no MPI starts either."""
_PIDS_OF_GROUP = Path("/sys/fs/cgroup/pids.max")


def too_many_ranks(n: int) -> str:
    """Why this host cannot start ``n`` ranks, and how many it can; empty when nothing speaks against it."""
    limits = {
        "processes that this user may have": _processes() // _THREADS_PER_RANK,
        "open files that a process may have": (_open_files() - _FILES_OF_SUPERVISOR) // _FILES_PER_RANK,
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _BYTES_PER_RANK,
    }
    what, most = min(limits.items(), key=lambda limit: limit[1])
    if n <= most:
        return ""
    return f"{n} ranks are more than this host can start: at most {max(most, 0)}, limited by the {what}"


def check_file_size() -> None:
    """Raise RingError where a limit on the size of files keeps ranks from sharing memory at all."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILE:
        raise RingError(
            f"this process may write files of {soft >> 10} KiB at most (`ulimit -f`), and ranks share memory that "
            "counts as a file; start it after `ulimit -f unlimited`"
        )


def _open_files() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if hard == resource.RLIM_INFINITY else hard


def _processes() -> int:
    limits = [int(Path(f"/proc/sys/kernel/{name}").read_text()) for name in ("pid_max", "threads-max")]
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    with contextlib.suppress(OSError, ValueError):  # no such limit
        limits.append(int(_PIDS_OF_GROUP.read_text()))
    return min(limits)
