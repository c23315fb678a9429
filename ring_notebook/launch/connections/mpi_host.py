"""What ranks of one host need to find the others, and what MPICH leaves in /dev/shm when they are killed."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from ring_notebook.files.claimed_folders import claim, remove_unclaimed
from ring_notebook.launch.connections import pmi
from ring_notebook.rank import rendezvous
from ring_notebook.rank.rank_variables import NO_MPI, STARTED_AGAIN

ALONE: Mapping[str, str] = {"UCX_TLS": "self,sm"}
"""The transports of ranks on one host. UCX, MPICH's transport, listens on all interfaces unless it stays within one."""
SHM = "/dev/shm"
# MPICH names its files there and nowhere else; without it, as in some containers, ranks without MPI still start.
FOLDER = Path(SHM if os.access(SHM, os.W_OK) else tempfile.gettempdir())
_JOB = re.compile(r"ring-\d+-[0-9a-f]{16}")


def needed_memory(ranks: int) -> int:
    """The bytes of /dev/shm that MPICH 5 was seen to need for ``ranks`` ranks."""
    return (20 + 5 * ranks) << 20


def mpich_problem(ranks: int) -> str:
    """Why MPICH cannot start ``ranks`` ranks on this host, where it would abort or hang; empty if it can."""
    if not os.access(SHM, os.W_OK):
        return f"MPI needs {SHM}, which cannot be written here"
    about = os.statvfs(SHM)
    free, needed = about.f_bavail * about.f_frsize, needed_memory(ranks)
    if free < needed:
        return f"MPI needs {needed >> 20} MiB of {SHM} for {ranks} ranks, and {free / (1 << 20):.3g} MiB are free"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind("")  # as UCX does: the system chooses an abstract name
        except OSError as error:
            return f"MPI needs Unix sockets with abstract names, which this system refuses ({error.strerror})"
    try:
        os.sched_getaffinity(0)
    except OSError as error:  # hwloc, a part of MPICH, would retry for ever
        return f"MPI needs sched_getaffinity, which this system refuses ({error.strerror})"
    return ""


class MpiHost:
    """The ``ranks`` ranks of ``job`` on this host, with variables for their ``network``.

    Those of an ``elastic`` job have no MPI. ``at_death`` is called when this process dies before `close`. Create it
    before this process has threads.
    """

    def __init__(
        self,
        job: str,
        ranks: int,
        network: Mapping[str, str],
        elastic: bool = False,
        at_death: Callable[[], None] | None = None,
    ) -> None:
        self._problem = mpich_problem(ranks)  # before MPICH of one of them takes memory: all get one answer
        remove_abandoned()
        self._claim = claim_folder(job)
        self._cleaner = Cleaner((*pmi.shared_memory_prefixes(job), job), self._claim, at_death)
        self._network = network
        self._elastic = elastic
        self._folder = FOLDER / job

    def variables(self, size: int, rank: int, channel: socket.socket, formation: int) -> dict[str, str]:
        """Variables that make a process rank ``rank`` of ``size``; it must inherit ``channel``.

        A process that joins a running job has no MPI.
        """
        descriptor = channel.fileno()  # one socket for our rendezvous and for MPI's
        found = {**rendezvous.variables(rank, size, descriptor), **self._network}
        if self._elastic or formation:
            return {**found, STARTED_AGAIN: str(formation)} if formation else found
        if self._problem:
            found[NO_MPI] = self._problem
        # In our folder, because UCX's files would outlive ranks that are killed while they start.
        return {**found, **pmi.variables(rank, size, descriptor), "UCX_POSIX_DIR": str(self._folder)}

    def close(self) -> None:
        """Remove the files of the ranks; all have exited."""
        self._cleaner.close()
        os.close(self._claim)


def claim_folder(job: str) -> int:
    """Make the folder of ``job`` in `FOLDER`; `remove_abandoned` keeps it while the returned descriptor is open.

    It may exist: two host names of the job may mean this host.
    """
    return claim(FOLDER / job)


def remove_abandoned() -> None:
    """Remove the folders of this user that no process claims any more, and MPICH's files of the same jobs."""
    if not FOLDER.is_dir():
        return
    for path in FOLDER.iterdir():
        if _JOB.fullmatch(path.name) and path.is_dir():
            names = (*pmi.shared_memory_prefixes(path.name), path.name)
            remove_unclaimed(path, functools.partial(_remove, names))


def _remove(prefixes: tuple[str, ...]) -> None:
    """Remove this user's files whose names begin with ``prefixes``; folders last, because they say what to remove."""
    found = [path for path in FOLDER.iterdir() if path.name.startswith(prefixes)]
    for path in sorted(found, key=lambda path: path.name.startswith("ring-")):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid != os.geteuid():
                continue
            if stat.S_ISDIR(status.st_mode):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


class Cleaner:
    """A process that outlives this one, and then removes the files whose names begin with ``prefixes``.

    Unless this process has called `close`, it calls ``at_death`` first. It keeps the descriptor ``claim`` open. Create
    it before this process has threads.
    """

    def __init__(self, prefixes: tuple[str, ...], claim: int, at_death: Callable[[], None] | None = None) -> None:
        self._prefixes = prefixes
        ends, self._alive = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _clean_at_end(ends, prefixes, claim, at_death)
            finally:
                os._exit(0)
        os.close(ends)

    def close(self) -> None:
        """Have the files removed now, and return when they are."""
        with contextlib.suppress(OSError):  # it has been killed
            os.write(self._alive, b"c")
        os.close(self._alive)
        ended = -1
        with contextlib.suppress(ChildProcessError):
            ended = os.waitpid(self._pid, 0)[1]
        if ended:
            _remove(self._prefixes)


def _clean_at_end(ends: int, prefixes: tuple[str, ...], claim: int, at_death: Callable[[], None] | None) -> None:
    # A session of its own: signals to the job's process group are not meant for it.
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    kept, ends = os.dup(claim), os.dup(ends)
    os.dup2(ends, 0)
    os.dup2(kept, 1)
    os.closerange(2, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 16 else 1 << 16)
    # Ends with a byte from `close`, or when the last process that has the other end of the pipe has exited.
    if not os.read(0, 1) and at_death is not None:
        at_death()
    _remove(prefixes)
