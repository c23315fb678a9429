"""Which ranks take part in the next epoch, and its number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ring_notebook.config import config
from ring_notebook.core.topology import Place, Topology

__all__ = ["agree", "living", "ranks_of"]


def ranks_of(comm: Any, topology: Topology, everyone: Sequence[int]) -> list[int]:
    """The ranks of the job that ``comm`` stands for: an mpi4py communicator, or indices into the list ``everyone``.

    Raises ValueError for ranks that do not exist, occur twice or leave this one out.
    """
    if isinstance(comm, Sequence):
        listed = [int(index) for index in comm]
        _check(listed, len(everyone), everyone.index(topology.rank))
        return [everyone[index] for index in listed]
    from mpi4py import MPI

    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = list(group.Translate_ranks(list(range(group.Get_size())), world))
    _check(ranks, topology.size, topology.rank)
    return ranks


def _check(ranks: list[int], size: int, own: int) -> None:
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < size for rank in ranks):
        raise ValueError(f"rank {own}: init: ranks must be distinct and between 0 and {size - 1}, got {ranks}")
    if own not in ranks:
        raise ValueError(f"rank {own}: init: this rank is not in {ranks}; call init(comm) on the ranks of comm only")


def agree(place: Place, ranks: list[int], last: int, run: int) -> tuple[int, list[int]]:
    """The number of the epoch that ``ranks`` of the job open now, and those of them that do: the living.

    All that live must call this; ``last`` is the newest epoch that this rank has tried. Ranks that were in other
    subsets have tried others. Where a death ends the job anyway, a rank that has died raises CollectiveAborted, as
    does one that has left ``run``. Interruptible among the ranks of one host.
    """
    if len(ranks) == 1:
        return last + 1, ranks
    if any(place.domains[rank] != place.domains[ranks[0]] for rank in ranks):
        return _agree_through_mpi(ranks, last), ranks
    mates = place.mates
    candidates = sorted(mates.index(rank) for rank in ranks)
    epoch, members = place.domain.agree_on_members(candidates, last, run, place.elastic, config().timeout)
    alive = {mates[member] for member in members}
    return epoch, [rank for rank in ranks if rank in alive]


def living(place: Place, ranks: Sequence[int]) -> int:
    """How many of these ranks of the job have not died, as far as can be seen from this host."""
    mates = place.mates
    return sum(rank not in mates or not place.domain.dead(mates.index(rank)) for rank in ranks)


def _agree_through_mpi(ranks: list[int], last: int) -> int:
    from mpi4py import MPI

    group = MPI.COMM_WORLD.Get_group().Incl(ranks)
    comm = MPI.COMM_WORLD.Create_group(group)
    agreed = int(comm.allreduce(last, op=MPI.MAX))
    comm.Free()
    return agreed + 1
