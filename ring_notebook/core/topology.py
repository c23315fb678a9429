"""Who and where am I: the ranks of this job, the hosts they run on, and the ring memory of this host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ring_notebook import _core
    from ring_notebook.rank.rendezvous import Rendezvous

__all__ = ["Place", "Topology"]


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
    domain: _core.Domain
    link: _core.Link | None = None
    """Moves bytes to ranks that do not share ``domain``; addressed by rank. None where there are none."""
    domains: tuple[int, ...] = ()
    """The ring memory that each rank of the job maps, as an index: its host, or under RING_ALGORITHM=ring itself."""
    elastic: bool = False
    """Whether the job survives ranks that die."""
    shared: _core.Domain | None = None
    """The memory that all ranks map where ``domain`` is of this rank alone, under RING_ALGORITHM=ring."""
    rendezvous: Rendezvous | None = None
    """Where its ranks have found each other; None for MPI, and where there are no others."""
    leave: Callable[[], None] = lambda: None
    """Gives up the link to other hosts, once no communicator uses it."""

    @property
    def mates(self) -> list[int]:
        """The ranks that map the same ring memory, in the order of their local ranks in it."""
        return [rank for rank, domain in enumerate(self.domains) if domain == self.domains[self.topology.rank]]
