"""Which ranks `init` is for, and the number of their next generation."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from itertools import count
from math import inf
from operator import index
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeAlias

from ring_notebook.config import config
from ring_notebook.core.native import core
from ring_notebook.core.place import Place, Topology
from ring_notebook.errors import CollectiveTimeout

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

    from ring_notebook import _core

RanksOrComm: TypeAlias = "Sequence[int] | Comm"
"""Some ranks of a job: their numbers, or a communicator of mpi4py."""

_AGREEMENT = struct.Struct("!qq")  # the number of a rank's attempt, and of a generation
_PAUSE = 0.0005  # seconds between looks at the link
_attempts = count()


def ranks_of(comm: RanksOrComm, topology: Topology, everyone: Sequence[int]) -> list[int]:
    """The ranks of the job that ``comm`` stands for: an mpi4py communicator, or indices into the list ``everyone``.

    Raises ValueError for ranks that do not exist, occur twice or leave this one out.
    """
    if isinstance(comm, Sequence):
        listed = [rank_number(one) for one in comm]
        _check(listed, len(everyone), everyone.index(topology.rank))
        return [everyone[index] for index in listed]
    from mpi4py import MPI

    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = list(group.Translate_ranks(list(range(group.Get_size())), world))
    _check(ranks, topology.size, topology.rank)
    return ranks


def rank_number(value: Any) -> int:
    """A rank that a user gives. Raises TypeError for anything but a whole number."""
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"ranks are whole numbers, got {value!r}") from None


def _check(ranks: list[int], size: int, own: int) -> None:
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < size for rank in ranks):
        raise ValueError(f"rank {own}: init: ranks must be distinct and between 0 and {size - 1}, got {ranks}")
    if own not in ranks:
        raise ValueError(f"rank {own}: init: this rank is not in {ranks}; call init(comm) on the ranks of comm only")


def agree(place: Place, ranks: list[int], last: int, run: int) -> int:
    """Agree with ``ranks`` of the job on the number of the generation that they open now; all of them call this.

    ``last`` is the newest generation that this rank has tried; ranks that were in other subsets have tried others.
    Raises CollectiveAborted when one of them has died, or left ``run``. Interruptible, except where MPI connects hosts.
    """
    if len(ranks) == 1:
        return last + 1
    if any(place.memories[rank] != place.memories[ranks[0]] for rank in ranks):
        if isinstance(place.link, core.TcpLink):
            return _agree_over_tcp(place.link, ranks, place.topology.rank, last)
        return _agree_through_mpi(ranks, last)
    mates = sorted(place.mates.index(rank) for rank in ranks)
    return place.ring_memory.agree_on_generation(mates, last, run, config().timeout)


def _agree_over_tcp(link: _core.TcpLink, ranks: list[int], own: int, last: int) -> int:
    """Each rank sends ``last`` to the first one, which answers with the greatest ``last`` plus 1.

    An interrupted rank tries again: its newest message counts, and it ignores answers to earlier attempts. Raises
    CollectiveTimeout after ``RING_TIMEOUT``.
    """
    limit = config().timeout
    deadline = monotonic() + limit if limit > 0 else inf

    def pause(missing: Sequence[int]) -> None:
        if monotonic() > deadline:
            names = ", ".join(f"rank {rank}" for rank in missing)
            raise CollectiveTimeout(f"rank {own} waited {limit:.1f} s for {names} to join the next generation")
        sleep(_PAUSE)

    leader, others = ranks[0], ranks[1:]
    tag = link.first_free_tag + zlib.crc32(repr(ranks).encode()) % (1 << 24)  # other sets agree beside this one
    if own == leader:
        attempts: dict[int, tuple[int, int]] = {}
        while (found := link.take(tag)) or len(attempts) < len(others):
            if found is None:
                pause([rank for rank in others if rank not in attempts])
                continue
            attempts[found[0]] = _AGREEMENT.unpack(found[1])
        agreed = max([last, *(number for _, number in attempts.values())]) + 1
        for rank, (attempt, _) in attempts.items():
            link.post(rank, tag, _AGREEMENT.pack(attempt, agreed))
        return agreed
    attempt = next(_attempts)
    link.post(leader, tag, _AGREEMENT.pack(attempt, last))
    while True:
        if (found := link.take(tag)) is None:
            pause([leader])
            continue
        answered, agreed = _AGREEMENT.unpack(found[1])
        if answered == attempt:
            return int(agreed)


def _agree_through_mpi(ranks: list[int], last: int) -> int:
    from mpi4py import MPI

    group = MPI.COMM_WORLD.Get_group().Incl(ranks)
    comm = MPI.COMM_WORLD.Create_group(group)
    agreed = int(comm.allreduce(last, op=MPI.MAX))
    comm.Free()
    return agreed + 1
