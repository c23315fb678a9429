"""Process sets: groups of ranks with a communicator of their own, under Horovod's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from ring_notebook.core import background_programs, world
from ring_notebook.core.buffers import from_memoryview
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.membership import rank_number


class ProcessSet:
    """A group of ranks with collectives of its own (Horovod: ``ProcessSet``).

    ``ranks_or_comm`` is a list of global ranks, or an mpi4py communicator (each rank gives the one that it is a member
    of, so that one ``comm.Split`` makes several sets; a rank outside of all sets gives ``MPI.COMM_NULL``). The set can
    be used after ``init(process_sets=[...])`` or `add_process_set` has registered it, until the next ``shutdown()``.
    """

    process_set_id: int | None = None
    """Number of the set, equal on all ranks; 0 for the global set, None for a set that is not registered."""

    def __init__(self, ranks_or_comm: Any) -> None:
        self._ranks: tuple[int, ...] | None = None
        self._mpi: Any = None  # an mpi4py communicator until the set is registered
        if isinstance(ranks_or_comm, Iterable) and not isinstance(ranks_or_comm, str):
            ranks_or_comm = list(ranks_or_comm)
            self._ranks = tuple(sorted({rank_number(one) for one in ranks_or_comm}))
            if len(self._ranks) != len(ranks_or_comm):
                raise ValueError(f"the ranks of a process set must be distinct, got {ranks_or_comm}")
        elif not hasattr(ranks_or_comm, "allgather"):
            raise TypeError(
                f"ProcessSet takes a list of ranks or an mpi4py communicator, got {type(ranks_or_comm).__name__}"
            )
        else:
            self._mpi = ranks_or_comm
        self._world: world.World | None = None
        self._group: Communicator | None = None

    def __deepcopy__(self, memo: object) -> ProcessSet:
        """The set itself: copies of objects that use it use the same ranks."""
        return self

    @property
    def ranks(self) -> list[int] | None:
        """Global ranks of the members, ascending; None for a set made from a communicator that is not registered."""
        return None if self._ranks is None else list(self._ranks)

    @property
    def communicator(self) -> Communicator:
        """The core's communicator of this set. Raises ValueError if the set is not registered or lacks this rank."""
        group = self._group
        if group is not None and self._world is world.current():
            return group
        self._check_registered()
        if group is None:
            raise ValueError(
                f"rank {world.current().rank} is not in process set {self.process_set_id} (ranks {self.ranks}); "
                "guard the call with process_set.included()"
            )
        return group

    @property
    def in_turn(self) -> Communicator:
        """`communicator`, once background programs that the script has started have made their collectives."""
        background_programs.settle()
        return self.communicator

    def _check_registered(self) -> None:
        current = world.current()
        if self._world is not current:
            raise ValueError(
                f"rank {current.rank}: process set {self.ranks} is not registered in this run; call "
                "add_process_set() after init()"
            )

    def registered(self) -> bool:
        """Whether collectives can use the set: it was registered since the last ``init()``."""
        return world.is_initialized() and self._world is world.current()

    def included(self) -> bool:
        """Whether this process is a member. Raises ValueError when the set is not registered."""
        self._check_registered()
        return self._group is not None

    def rank(self) -> int:
        """Index of this process among the members, -1 when it is not a member."""
        return self.communicator.rank if self.included() else -1

    def size(self) -> int:
        """Number of members."""
        self._check_registered()
        return len(self._ranks or ())

    def group_rank(self, rank: int) -> int:
        """Index among the members of the global rank ``rank``. Raises ValueError when it is not a member."""
        _ = self.communicator  # raises with the reason if there is none
        ranks = self.ranks or []
        if rank not in ranks:
            raise ValueError(
                f"rank {world.current().rank}: root_rank={rank!r} is not in process set {self.process_set_id} "
                f"(ranks {ranks}); pass one of these global ranks"
            )
        return ranks.index(rank)

    def __reduce__(self) -> Any:
        """Unpickles as the registered set of these ranks, if the process has one."""
        return _set_of, (None if self is global_process_set else self.ranks,)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self._mpi})"  # Horovod's
        )


class _GlobalProcessSet(ProcessSet):
    """All ranks of the current world: registered while a generation is open."""

    process_set_id = 0

    def __init__(self) -> None:
        super().__init__(())

    @property
    def ranks(self) -> list[int] | None:
        return list(range(world.current().size))

    @property
    def communicator(self) -> Communicator:
        return world.current().communicator

    def registered(self) -> bool:
        return world.is_initialized()

    def included(self) -> bool:
        world.current()
        return True

    def size(self) -> int:
        return world.current().size

    def __repr__(self) -> str:
        return "global_process_set"


global_process_set: ProcessSet = _GlobalProcessSet()


def _set_of(ranks: list[int] | None) -> ProcessSet:
    if ranks is None:
        return global_process_set
    known = _registered() if world.is_initialized() else []
    return next((one for one in known if one.ranks == ranks), None) or ProcessSet(ranks)


# Sets of earlier worlds stay here until the next change; `_registered` skips them.
_sets: list[ProcessSet] = []


def _registered() -> list[ProcessSet]:
    current = world.current()
    _sets[:] = [known for known in _sets if world.is_open(known._world)]
    return [known for known in _sets if known._world is current]


def _get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of each registered set, by its number (Horovod: the same name in ``mpi_ops._basics``)."""
    return {one.process_set_id or 0: one.ranks or [] for one in (global_process_set, *_registered())}


def process_set_of(number: int) -> ProcessSet:
    """The registered set with this `ProcessSet.process_set_id`. Raises ValueError when there is none."""
    if number == 0:
        return global_process_set
    found = next((known for known in _registered() if known.process_set_id == number), None)
    if found is None:
        raise ValueError(
            f"rank {world.current().rank}: process set {number} is not registered in this run; register it again, and "
            "trace functions that use it again"
        )
    return found


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set; all ranks must call this, in the same order (Horovod: ``add_process_set``).

    It gets the lowest free number, which a removed set may have had. Raises ValueError for ranks out of range and for a
    set whose ranks are registered already.
    """
    background_programs.settle()
    current, registered = world.current(), _registered()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added is global_process_set or added in registered:
        raise ValueError(f"rank {current.rank}: {added!r} is already registered")
    wanted = [added] if added._mpi is None else _split(added)
    for member in wanted:
        ranks = member._ranks or ()
        if any(not 0 <= rank < current.size for rank in ranks):
            raise ValueError(
                f"rank {current.rank}: a process set needs ranks within 0..{current.size - 1}, got {list(ranks)}"
            )
        if any(known._ranks == ranks for known in registered):
            raise ValueError(f"rank {current.rank}: a process set of ranks {list(ranks)} is already registered")
    for member in wanted:
        _register(member)
    return added


def _register(member: ProcessSet) -> None:
    current = world.current()
    # Empty sets are allowed: a script that takes ranks 1, 3, ... has one at size 1.
    member._group = current.communicator.group(member._ranks) if member._ranks else None
    member._world = current
    taken = {known.process_set_id for known in _sets}
    member.process_set_id = next(number for number in count(1) if number not in taken)
    _sets.append(member)


def registered_sets() -> dict[ProcessSet, list[int]]:
    """The registered sets, in order, with their members' ranks in the job, for `register_again`."""
    current = world.current()
    return {known: [current.ranks[rank] for rank in known._ranks or ()] for known in _registered()}


def register_again(sets: Mapping[ProcessSet, Sequence[int]]) -> None:
    """Register sets of an earlier generation in this one; all ranks must call this with the same sets.

    Each keeps its members that are in this generation, under their new numbers. Sets that have become equal stay
    separate; a set without members is empty.
    """
    _registered()
    ranks = world.current().ranks
    for process_set, members in sets.items():
        process_set._ranks = tuple(sorted(ranks.index(member) for member in members if member in ranks))
        _register(process_set)


def _split(added: ProcessSet) -> list[ProcessSet]:
    """The sets of all ranks' MPI communicators, in the same order on every rank; ``added`` is one of them."""
    current = world.current()
    members = tuple(sorted(added._mpi.allgather(current.rank))) if added._mpi else ()
    # Numbers as text with a newline at the end, because the gathered data must not be empty.
    text = bytearray("".join(f"{member} " for member in members).encode() + b"\n")
    work = current.communicator.allgather(from_memoryview(text), name="process sets")
    lines = bytes(work.output()).decode().splitlines()
    distinct = sorted({tuple(map(int, line.split())) for line in lines} - {()})
    added._ranks = members
    sets = [added if ranks == members else ProcessSet(ranks) for ranks in distinct]
    return sets if members else [*sets, added]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set; all ranks must call this (Horovod: ``remove_process_set``).

    Returns False, and does nothing, for the global set and for a set that is not registered.
    """
    if process_set not in _registered():
        return False
    background_programs.settle()
    _sets.remove(process_set)
    if process_set._group is not None:
        process_set._group.close()
    process_set._group = process_set._world = process_set.process_set_id = None
    return True
