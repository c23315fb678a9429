"""Our own supervisor as a launcher, on this host and over several, and how many ranks this host can start."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ring_notebook.errors import RingError
from ring_notebook.launch.launchers.hosts import Host, check_slots, only_here
from ring_notebook.launch.launchers.launcher import Launcher
from ring_notebook.launch.supervisor.growth import NOT_ELASTIC, Elastic
from ring_notebook.machine.hardware import processes_of_container
from ring_notebook.machine.os_calls import NO_PROC, has_proc, number_in, resource_limits
from ring_notebook.machine.own_python import module_command

_FILES_PER_RANK = 8
"""Open files of the supervisor: a socket, a status file, a log, two pipes, two process descriptors and a selector."""
_FILES_OF_SUPERVISOR = 24
_THREADS_PER_RANK = 2
"""The rank itself, and the thread that passes its output on."""
_BYTES_PER_RANK = 1 << 20
"""Memory of the smallest program."""
_LEAST_FILE = 16 << 20
"""Bytes of a file below which no MPI starts either."""
_UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class Own(Launcher):
    """Our supervisor on this host. An agent on each other host starts the ranks there, and nothing of ours listens.

    An agent gets the whole environment, over the streams of ssh or the batch system's own program.

    An ``elastic`` job continues without ranks that fail, may grow, and has no MPI.
    With a named pipe for ``requests`` the ranks are a notebook's engines: those that live continue, and others are
    started again when `engine_supervisor.request` asks for it.
    """

    mpis = ("MPICH",)
    foreign = False

    path: str = sys.executable
    elastic: Elastic = NOT_ELASTIC
    requests: str = ""

    def __str__(self) -> str:
        return "the supervisor of ring_notebook"

    @property
    def starts_again(self) -> bool:
        return bool(self.requests)

    def options(self, n: int, hosts: Sequence[Host], exported: Iterable[str]) -> list[str]:
        here = only_here(hosts)
        if here and (problem := too_many_ranks(n)):
            raise ValueError(problem)
        named = ""
        if not here or self.elastic.grows:  # else slots that are free do not matter
            check_slots(n, hosts or [Host("localhost", n)])
            named = ",".join(map(str, hosts))
        arguments = str(n), str(self.elastic), self.requests, named
        return module_command("ring_notebook.launch.supervise", *arguments)[1:]


def too_many_ranks(n: int) -> str:
    """Why this host cannot start ``n`` ranks, and how many it can; empty when nothing speaks against it."""
    limits = {
        "processes that this user may have": processes_allowed() // _THREADS_PER_RANK,
        "open files that a process may have": (_open_files() - _FILES_OF_SUPERVISOR) // _FILES_PER_RANK,
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _BYTES_PER_RANK,
    }
    what, most = min(limits.items(), key=lambda limit: limit[1])
    if n <= most:
        return ""
    return f"{n} ranks are more than this host can start: at most {max(most, 0)}, limited by the {what}"


def check_shared_memory() -> None:
    """Raise RingError where a limit on the size of files, or no /proc, keeps ranks from sharing memory at all."""
    if not has_proc():
        raise RingError(NO_PROC)
    soft, _ = resource_limits(resource.RLIMIT_FSIZE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILE:
        raise RingError(
            f"this process may write files of {soft >> 10} KiB at most (`ulimit -f`), and ranks share memory that "
            "counts as a file; start it after `ulimit -f unlimited`"
        )


def _open_files() -> int:
    _, hard = resource_limits(resource.RLIMIT_NOFILE)
    return _UNLIMITED if hard == resource.RLIM_INFINITY else hard


def processes_allowed() -> int:
    """How many processes and threads this process and others beside it may be together."""
    files = ("/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max")
    limits = [processes_of_container(), *(limit for file in files if (limit := number_in(file)) is not None)]
    soft, _ = resource_limits(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return min(limits)
