"""Finds the place of this process among the ranks of its job: hosts, ring memory and links to other hosts."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from ring_notebook.config import config
from ring_notebook.core.native import core, operation_log
from ring_notebook.errors import MPIMissingError, RingError
from ring_notebook.machine.hardware import RDMA
from ring_notebook.rank.rank_variables import OF_LAUNCHERS
from ring_notebook.rank.rendezvous import FormationError, Rendezvous
from ring_notebook.rank.started_together import check_alone
from ring_notebook.rank.tcp_connections import TcpConnections, listen

if TYPE_CHECKING:
    from ring_notebook import _core

_SECONDS_TO_STOP = 2.0


@dataclass(frozen=True, slots=True)
class Topology:
    """A set of ranks and where they run. ``hosts[r]`` is the index of the host of rank r, in order of appearance."""

    rank: int
    hosts: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def local_ranks(self) -> list[int]:
        """The ranks on this rank's host."""
        return [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]

    @property
    def local_rank(self) -> int:
        """Index of this rank among those of its host."""
        return self.local_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        return len(self.local_ranks)

    @property
    def first_ranks(self) -> list[int]:
        """The first rank of each host."""
        return [rank for rank, host in enumerate(self.hosts) if self.hosts.index(host) == rank]

    @property
    def cross_ranks(self) -> list[int]:
        """The ranks that have the same local rank on their host, by host."""
        seen: dict[int, int] = {}
        result = []
        for rank, host in enumerate(self.hosts):
            if seen.setdefault(host, 0) == self.local_rank:
                result.append(rank)
            seen[host] += 1
        return result

    @property
    def cross_rank(self) -> int:
        """Index of this rank among those that have its local rank (Horovod: ``cross_rank``)."""
        return self.cross_ranks.index(self.rank)

    @property
    def cross_size(self) -> int:
        """Number of hosts that have a rank with this local rank (Horovod: ``cross_size``)."""
        return len(self.cross_ranks)

    def part(self, ranks: list[int]) -> Topology:
        """The topology of a subset: rank i of it is ``ranks[i]`` of this one."""
        order: dict[int, int] = {}
        hosts = tuple(order.setdefault(self.hosts[rank], len(order)) for rank in ranks)
        return Topology(ranks.index(self.rank), hosts)


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process is among the ranks of a job: its whole topology, and this host's ring memory."""

    topology: Topology
    ring_memory: _core.RingMemory
    link: _core.Link | None = None
    """Moves bytes to ranks that do not share ``ring_memory``; addressed by rank. None where there are none."""
    memories: tuple[int, ...] = ()
    """For each rank of the job, the index of the ring memory that it maps: one per host, or per rank with
    RING_ALGORITHM=ring."""
    elastic: bool = False
    """Whether the job survives ranks that die."""
    rendezvous: Rendezvous | None = None
    """The rendezvous of the job's ranks; None with MPI, and for a single rank."""
    logs: tuple[str, ...] = ()
    """For each rank of the job, the log of its last operations, a file on its host; empty if unknown."""
    leave: Callable[[], None] = lambda: None
    """Gives up the link to other hosts, once no communicator uses it."""

    @property
    def mates(self) -> list[int]:
        """The ranks that map the same ring memory, in the order of their local ranks in it."""
        return [rank for rank, one in enumerate(self.memories) if one == self.memories[self.topology.rank]]


def launched_by_mpi() -> bool:
    """Whether an MPI launcher started this process, or the program has loaded MPI itself."""
    return "mpi4py.MPI" in sys.modules or any(name in os.environ for name in OF_LAUNCHERS)


class _MpiRendezvous:
    """The rendezvous of ranks that a site's mpiexec has started: MPI's own allgather."""

    def __init__(self) -> None:
        mpi = _load_mpi()
        self._world = mpi.COMM_WORLD
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()
        self.members = tuple(range(self.size))
        self.key, self.address, self.elastic, self.has_mpi = b"", "", False, True
        host = self._world.Split_type(mpi.COMM_TYPE_SHARED)
        self.host: object = host.bcast(self.rank, root=0)
        host.Free()

    def gather(self, value: Any, last: bool = False) -> list[Any]:
        values: list[Any] = self._world.allgather(value)
        return values

    def formed(self) -> None:
        unname_shared_memory()  # all ranks have opened it: they have gathered since

    def close(self) -> None:
        pass


def unname_shared_memory() -> None:
    """Unlink the files in /dev/shm that MPICH has mapped into this process; the memory stays.

    MPICH removes them in MPI_Finalize alone, which a rank that is killed never reaches. Call it after a
    barrier that follows MPI's start: the other ranks of the host open the files by name. Open MPI's launcher
    removes its own.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith("/dev/shm/mpich_"):
            with suppress(OSError):  # a rank of this host was faster
                os.unlink(path)


def find_place() -> Place:
    """Find the other ranks, and map the ring memory of this host. Collective over all ranks of a job.

    Raises MPIMissingError when a launcher of MPI started this process and no MPI library can be loaded;
    OutOfRingMemoryError when the memory cannot be mapped; ValueError for settings that differ between ranks or exclude
    each other. Raises RingError when another rank fails here or ends earlier, when this process is alone although its
    launcher has started several, and when MPI connects hosts and was not initialized for threads.
    """
    rendezvous: Rendezvous | _MpiRendezvous | None = Rendezvous.take()
    if rendezvous is None and launched_by_mpi():
        rendezvous = _MpiRendezvous()
    if rendezvous is None or (isinstance(rendezvous, _MpiRendezvous) and rendezvous.size == 1):
        check_alone()
    if rendezvous is None:
        return Place(Topology(0, (0,)), core.RingMemory.create(0, 1, config().memory), None, (0,))
    with _closed_on_failure(rendezvous):
        return _join(rendezvous) if isinstance(rendezvous, Rendezvous) and rendezvous.joins else _form(rendezvous)


def _join(rendezvous: Rendezvous) -> Place:
    """The place of a process that joins an elastic job at its next assembly."""
    generation = 0
    while True:
        found = rendezvous.assemble([], generation, 0.0)
        generation = found.generation
        rendezvous.begin(found.formation, found.members, found.size)
        with suppress(FormationError):
            return _form(rendezvous)


def form_again(place: Place | None, formation: int, members: Sequence[int], size: int = 0) -> Place:
    """The place of this rank among ``members`` of its job, in new ring memory; ``place`` is the one that it has now.

    All members call this with the same ``formation``, greater than in any earlier call. The job then has ``size``
    ranks, by default as many as before. Raises RingError without a supervisor of ours, and as `find_place`.
    """
    rendezvous = place.rendezvous if place else Rendezvous.take()
    if rendezvous is None:
        raise RingError("this rank cannot join other ranks: no supervisor of ours has started it")
    rendezvous.begin(formation, members, size)
    with nullcontext() if place else _closed_on_failure(rendezvous):
        return _form(rendezvous)


@contextmanager
def _closed_on_failure(rendezvous: Rendezvous | _MpiRendezvous) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        rendezvous.close()
        if isinstance(error, FormationError):  # nobody assembles again
            raise RingError(str(error)) from None
        raise


def _form(rendezvous: Rendezvous | _MpiRendezvous) -> Place:
    formation = _Formation(rendezvous)
    try:
        cards = _together(rendezvous, formation.make)
        _together(rendezvous, lambda: formation.join(cards), last=True)
    except BaseException:
        formation.close()
        raise
    rendezvous.formed()
    return formation.place(cards)


def _together(rendezvous: Rendezvous | _MpiRendezvous, step: Callable[[], object], last: bool = False) -> list[Any]:
    """Call ``step`` on each rank; returns all results. If it fails on one rank, all raise: none waits in vain."""
    value: object = None
    error: Exception | None = None
    try:
        value = step()
    except Exception as caught:
        error = caught
    problem = error and f"rank {rendezvous.rank} raised {type(error).__name__}: {error}"
    gathered = rendezvous.gather([value, problem], last)
    if error is not None:
        raise error
    for rank in rendezvous.members:
        if gathered[rank][1] is not None:
            raise FormationError(f"rank {rendezvous.rank} failed to initialize: {gathered[rank][1]}")
    return [one and one[0] for one in gathered]


class _Formation:
    """Makes the memory of this host, and the link to other hosts, while the ranks of a job form."""

    def __init__(self, rendezvous: Rendezvous | _MpiRendezvous) -> None:
        self._rendezvous = rendezvous
        algorithm = "ring" if config().algorithm == "ring" else "auto"
        own = [rendezvous.host, algorithm, config().transport, any(RDMA.glob("*/ports/*")), rendezvous.has_mpi]
        gathered = rendezvous.gather(own)
        rendezvous.has_mpi = all(one and one[4] for one in gathered)  # False with dead or replaced ranks
        # A rank that takes no part counts as one of the first one's host.
        hosts = [(one or gathered[rendezvous.members[0]])[0] for one in gathered]
        order: dict[object, int] = {}
        self._topology = Topology(rendezvous.rank, tuple(order.setdefault(host, len(order)) for host in hosts))
        several = len(order) > 1
        self._way = _choose_way(rendezvous, {rank: gathered[rank][1:4] for rank in rendezvous.members}, several)
        self._apart = algorithm == "ring" and not several  # each rank acts as a host of its own
        self._memories = tuple(range(len(hosts))) if self._apart else self._topology.hosts
        self._mates = [rank for rank, one in enumerate(self._memories) if one == self._memories[rendezvous.rank]]
        self._maker = next(rank for rank in self._mates if rank in rendezvous.members)
        """The rank that makes the ring memory of this host."""
        self._memory: _core.RingMemory | None = None
        self._listener: socket.socket | None = None

    def make(self) -> list[Any]:
        """Listen and make the memory of this host, where needed; returns the card of this rank."""
        address, memory = None, None
        if self._way == "tcp":
            self._listener = listen("127.0.0.1" if self._apart else self._rendezvous.address)
            address = self._listener.getsockname()[:2]
        if self._rendezvous.rank == self._maker:
            self._memory = core.RingMemory.create(*self._place_in_memory(), config().memory)
            memory = os.getpid(), self._memory.fd, self._memory.token
        return [address, memory, operation_log().path]

    def _place_in_memory(self) -> tuple[int, int]:
        return self._mates.index(self._rendezvous.rank), len(self._mates)

    def join(self, cards: list[Any]) -> None:
        """Map the memory of this host."""
        if self._memory is None:
            self._memory = core.RingMemory.attach(*self._place_in_memory(), *cards[self._maker][1])
        if self._way == "mpi":
            _load_mpi()

    def place(self, cards: list[Any]) -> Place:
        """The place of this rank, once all have joined. Where MPI connects the hosts it is collective."""
        topology, memory, found = self._topology, self._memory, self._rendezvous
        assert memory is not None
        for mate in range(len(self._mates)):
            memory.dead(mate)  # opens a descriptor of its process, because the process number may be reused
        place = Place(
            topology,
            memory,
            memories=self._memories,
            elastic=found.elastic and self._way != "mpi",
            rendezvous=found if isinstance(found, Rendezvous) else None,
            logs=tuple(str(card[2]) if card else "" for card in cards),
        )
        if self._way == "mpi":
            link, leave = _mpi_link(_load_mpi())
            return replace(place, link=link, leave=leave)
        if self._listener is not None:
            tcp = core.TcpLink(topology.size)
            addresses = [(str(host), int(port)) for host, port in (card[0] if card else ("", 0) for card in cards)]
            connections = TcpConnections(tcp, topology.rank, self._listener, addresses, found.key)
            return replace(place, link=tcp, leave=partial(_hang_up, tcp, connections))
        return place

    def close(self) -> None:
        """Undo: the ranks do not form."""
        if self._listener is not None:
            self._listener.close()


def _choose_way(rendezvous: Rendezvous | _MpiRendezvous, settings: dict[int, list[Any]], several: bool) -> str:
    """What connects ranks that share no memory: ``tcp`` or ``mpi``; empty where all share one.

    ``settings`` are RING_ALGORITHM, RING_TRANSPORT and whether there are RDMA devices, by rank; ``several`` says that
    there are several hosts. All ranks raise ValueError where the settings differ or do not go together.
    """
    first, *others = settings
    for at, name in enumerate(("RING_ALGORITHM", "RING_TRANSPORT")):
        for rank in others:
            if settings[rank][at] != settings[first][at]:
                raise ValueError(
                    f"rank {rank} has {name}={settings[rank][at]} and rank {first} has {settings[first][at]}; all "
                    "ranks need the same one"
                )
    algorithm, transport, _ = settings[first]
    if not several and algorithm != "ring":
        return ""
    if isinstance(rendezvous, _MpiRendezvous):
        return "mpi"
    if transport == "mpi" and not rendezvous.has_mpi:
        raise ValueError(
            "RING_TRANSPORT=mpi needs ranks that ringrun or a launcher of MPI has started; leave it out for TCP"
        )
    rdma = rendezvous.has_mpi and all(has_rdma for *_, has_rdma in settings.values())
    return "mpi" if transport == "mpi" or (transport == "auto" and rdma) else "tcp"


def _hang_up(link: _core.TcpLink, connections: TcpConnections) -> None:
    link.drain()
    connections.stop()
    # A thread that calls the core while the interpreter ends would abort the process.
    connections.join(_SECONDS_TO_STOP)


def _load_mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MPIMissingError(
            f"this process was started as an MPI rank, but MPI cannot be loaded ({error}). "
            "`pip install 'ring-notebook[mpi]'` brings one; a site's own MPI must be on LD_LIBRARY_PATH."
        ) from error
    return MPI


def _mpi_link(mpi: Any) -> tuple[_core.Link, Callable[[], None]]:
    """A link over a communicator of its own, so that it takes no message of the program's, and how to leave it."""
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise RingError(
            "ranks on several hosts need an MPI that several threads may call at once (MPI_THREAD_MULTIPLE), and this "
            "one was initialized for less. Do not set mpi4py.rc.thread_level, or use an MPI that was built for it."
        )
    comm = mpi.COMM_WORLD.Dup()
    mask = (1 << 64) - 1
    tags = int(comm.Get_attr(mpi.TAG_UB) or 32767)
    link = core.mpi_link(
        mpi.__file__,
        mpi._handleof(comm) & mask,
        mpi._handleof(mpi.BYTE) & mask,
        mpi._sizeof(mpi.Comm),
        mpi.ANY_SOURCE,
        mpi.ANY_TAG,
        tags,
    )
    return link, partial(_drain, comm, link)


def _drain(comm: Any, link: _core.Link) -> None:
    """Receive notices that nobody waited for: some MPIs complain about them when they finalize."""
    everyone = comm.Ibarrier()
    deadline = monotonic() + 2.0
    while not everyone.Test() and monotonic() < deadline:
        sleep(0.005)
    link.drain()
