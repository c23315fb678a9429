"""Finds the place of this process: through MPI, through its supervisor, or alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ring_notebook.config import config
from ring_notebook.core.native import core
from ring_notebook.core.topology import Place, Topology
from ring_notebook.errors import MPIMissingError, RingError
from ring_notebook.rank.agent_rendezvous import AgentRendezvous
from ring_notebook.rank.hosts_rendezvous import HostsRendezvous
from ring_notebook.rank.launch_check import check_alone
from ring_notebook.rank.mpi_memory import unname_shared_memory
from ring_notebook.rank.process_exit import at_exit
from ring_notebook.rank.rendezvous import Rendezvous
from ring_notebook.rank.tcp_connections import TcpConnections, listen

if TYPE_CHECKING:
    from ring_notebook import _core

__all__ = ["find_place", "join_place", "launched_by_mpi", "make_place"]

_Result = TypeVar("_Result")
_LAUNCHERS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID")
_RDMA = Path("/sys/class/infiniband")


def launched_by_mpi() -> bool:
    """Whether an MPI launcher started this process, or the program has loaded MPI itself."""
    return "mpi4py.MPI" in sys.modules or any(name in os.environ for name in _LAUNCHERS)


def find_place() -> Place:
    """Map the ring memory of this host. Collective over all ranks of a job that was launched.

    Raises MPIMissingError when a launcher started this process and no MPI library can be loaded,
    OutOfRingMemoryError when the memory cannot be mapped, RingError when another rank fails here, when this process is
    alone and its launcher has started several, when MPI was not initialized for threads and there are several hosts, or
    when a rank of an elastic job ends before it comes here, and ValueError where such a job is to pretend that it has
    several hosts.
    """
    native = core()
    rendezvous = Rendezvous.take()
    if rendezvous is not None:
        return _place_without_mpi(rendezvous, elastic=bool(os.environ.get("RING_MIN_NP")))
    started = AgentRendezvous.take()
    if started is not None:
        return _place_without_mpi(started, elastic=False)
    hosts = HostsRendezvous.take()
    if hosts is not None and _agree_on_tcp(hosts):
        return _place_over_tcp(hosts)
    if not launched_by_mpi():
        check_alone()
        return Place(Topology(0, (0,)), native.Domain.create(0, 1, config().memory), None, (0,))
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MPIMissingError(
            f"this process was started as an MPI rank, but MPI cannot be loaded ({error}). "
            "`pip install mpich` brings one; a site's own MPI must be on LD_LIBRARY_PATH."
        ) from error
    return _place_over_mpi(MPI)


def _place_over_mpi(mpi: Any) -> Place:
    native = core()
    world = mpi.COMM_WORLD
    if world.Get_size() == 1:
        check_alone()
    host = world.Split_type(mpi.COMM_TYPE_SHARED)
    leaders = world.allgather(host.bcast(world.Get_rank(), root=0))
    order: dict[int, int] = {}
    hosts = tuple(order.setdefault(leader, len(order)) for leader in leaders)
    first = host.Get_rank() == 0

    def create() -> _core.Domain | None:
        return native.Domain.create(0, host.Get_size(), config().memory) if first else None

    def attach() -> _core.Domain:
        return created or native.Domain.attach(host.Get_rank(), host.Get_size(), *card)

    created = _together(world, create)
    card = host.bcast((os.getpid(), created.fd, created.token) if created else None, root=0)
    domain = _together(world, attach)
    topology = Topology(world.Get_rank(), hosts)
    if config().algorithm == "ring" and len(set(hosts)) == 1:
        offset = host.bcast(native.reserve_memory_link(domain) if first else None, root=0)
        link = native.memory_link(domain, offset)
        own = _together(world, lambda: native.Domain.create(0, 1, config().memory))
        place = Place(topology, own, link, tuple(range(topology.size)))
    elif len(set(hosts)) > 1:
        place = Place(topology, domain, _mpi_link(mpi), hosts)
    else:
        place = Place(topology, domain, None, hosts)
    world.Barrier()
    unname_shared_memory()
    host.Free()
    return place


def _together(world: Any, step: Callable[[], _Result]) -> _Result:
    """What ``step`` returns here, once it has returned on all ranks; where it failed on one, all raise.

    A rank that raised alone would leave the others in MPI's own calls, which nothing but its end gets them out of.
    """
    result: _Result | None = None
    error: Exception | None = None
    try:
        result = step()
    except Exception as caught:
        error = caught
    failures = world.allgather(error and f"rank {world.Get_rank()} raised {type(error).__name__}: {error}")
    if error is not None:
        raise error
    for failure in failures:
        if failure is not None:
            raise RingError(f"rank {world.Get_rank()} failed to initialize: {failure}")
    return cast(_Result, result)


def _agree_on_tcp(rendezvous: HostsRendezvous) -> bool:
    """Whether the ranks use TCP connections of our own. Collective; raises ValueError where their settings differ."""
    asked = rendezvous.gather([config().transport, any(_RDMA.glob("*/ports/*"))])
    settings = [setting for setting, _ in asked]
    for rank, setting in enumerate(settings):
        if setting != settings[0]:
            raise ValueError(
                f"rank {rank} has RING_TRANSPORT={setting} and rank 0 has {settings[0]}; all ranks need the same one"
            )
    if settings[0] == "auto":
        return not all(has_rdma for _, has_rdma in asked)
    return bool(settings[0] == "tcp")


def _place_over_tcp(rendezvous: HostsRendezvous) -> Place:
    """The place of a rank of several hosts that our own supervisor has started. It does without MPI."""
    native = core()
    order: dict[int, int] = {}
    topology = Topology(rendezvous.rank, tuple(order.setdefault(host, len(order)) for host in rendezvous.hosts))
    listener, address = None, None

    def create() -> _core.Domain | None:
        nonlocal listener, address
        listener = listen()
        address = listener.getsockname()[:2]
        return native.Domain.create(0, topology.local_size, config().memory) if topology.local_rank == 0 else None

    created, error = _try(create)
    told = rendezvous.gather_or_raise([address, (os.getpid(), created.fd, created.token) if created else None], error)
    domain, error = _try(
        lambda: (
            created or native.Domain.attach(topology.local_rank, topology.local_size, *told[topology.local_ranks[0]][1])
        )
    )
    rendezvous.gather_or_raise(None, error)
    rendezvous.close()
    assert domain is not None
    assert listener is not None
    link = native.TcpLink(topology.size)
    TcpConnections(link, topology.rank, listener, [(str(host), int(port)) for (host, port), _ in told], rendezvous.key)
    at_exit(link.drain)
    return Place(topology, domain, link, topology.hosts)


def _try(step: Callable[[], _Result]) -> tuple[_Result | None, Exception | None]:
    try:
        return step(), None
    except Exception as error:
        return None, error


def _place_without_mpi(rendezvous: Rendezvous | AgentRendezvous, elastic: bool) -> Place:
    """The place of a rank that no MPI connects: of an elastic job, or of another launcher's agent."""
    if config().algorithm == "ring":
        job = "an elastic job" if elastic else "a job that an agent started"
        raise ValueError(f"RING_ALGORITHM=ring makes a host of each rank, and {job} has one; leave one of them out")
    native = core()
    rank, size = rendezvous.rank, rendezvous.size
    if rank == 0:
        domain = native.Domain.create(0, size, config().memory)
        rendezvous.send_card([os.getpid(), domain.fd, domain.token])
    else:
        domain = native.Domain.attach(rank, size, *rendezvous.receive_card())
    rendezvous.wait_for_all()
    for mate in range(size):
        # From here on its process is known by a descriptor: another one that gets its number is not taken for it.
        domain.dead(mate)
    return Place(Topology(rank, (0,) * size), domain, None, (0,) * size, elastic)


def make_place(rank: int, size: int) -> tuple[Place, list[int]]:
    """The place of ``rank`` among ``size`` ranks of this host, in new ring memory, and the card of that memory.

    Others join it with `join_place`. Raises OutOfRingMemoryError when the memory cannot be mapped.
    """
    domain = core().Domain.create(rank, size, config().memory)
    return _place_on_one_host(rank, size, domain), [os.getpid(), domain.fd, domain.token]


def join_place(rank: int, size: int, card: list[int]) -> Place:
    """The place of ``rank`` in the ring memory of this card. Raises RingError when its process has ended."""
    return _place_on_one_host(rank, size, core().Domain.attach(rank, size, *card))


def _place_on_one_host(rank: int, size: int, domain: _core.Domain) -> Place:
    return Place(Topology(rank, (0,) * size), domain, None, (0,) * size)


def _mpi_link(mpi: Any) -> _core.Link:
    """A link over a communicator of its own, so that no message of the program's can be taken for one of ours."""
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise RingError(
            "ranks on several hosts need an MPI that several threads may call at once (MPI_THREAD_MULTIPLE), and this "
            "one was initialized for less. Do not set mpi4py.rc.thread_level, or use an MPI that was built for it."
        )
    comm = mpi.COMM_WORLD.Dup()
    mask = (1 << 64) - 1
    tags = int(comm.Get_attr(mpi.TAG_UB) or 32767)
    link = core().mpi_link(
        mpi.__file__,
        mpi._handleof(comm) & mask,
        mpi._handleof(mpi.BYTE) & mask,
        mpi._sizeof(mpi.Comm),
        mpi.ANY_SOURCE,
        mpi.ANY_TAG,
        tags,
    )
    at_exit(_drain, comm, link)
    return link


def _drain(comm: Any, link: _core.Link) -> None:
    """Take in the notices that nobody waited for, which some MPIs complain about when they finalize."""
    everyone = comm.Ibarrier()
    deadline = monotonic() + 2.0
    while not everyone.Test() and monotonic() < deadline:
        sleep(0.005)
    link.drain()
