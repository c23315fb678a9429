"""init, shutdown and the default communicator: the one place in Python that holds rank-wide state.

A *generation* is one formation of the default communicator. A script opens generations with `init`; an engine opens one
per run with `open_run`. An abort ends the generation, never the process: the next generation starts clean.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any

from ring_notebook.config import config
from ring_notebook.core import background_programs, freed_memory
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.membership import RanksOrComm, agree, ranks_of
from ring_notebook.core.native import core, devices, operation_log, options
from ring_notebook.core.place import Place, Topology, find_place, form_again
from ring_notebook.errors import CollectiveAborted, NotInitializedError, RingError
from ring_notebook.rank.exit_watch import at_exit, watch_exits
from ring_notebook.rank.rank_status import exit_code_of, report_status
from ring_notebook.rank.rendezvous import FormationError, Rendezvous, is_offered
from ring_notebook.text.error_text import cause_text


@dataclass(frozen=True, slots=True)
class World(Topology):
    """The ranks of the open generation, their hosts, and their communicator."""

    communicator: Communicator
    ranks: tuple[int, ...]
    """The rank in the job of each rank of the generation."""
    run: str | None = None


_PACKAGE = f"{Path(__file__).parents[1]}/"
_NO_RUN = 1 << 63
"""Run number of ranks outside of runs, as in a script."""


@dataclass
class _State:
    """The state of this process as a rank."""

    place: Place | None = None
    process: int = 0
    """Id of the process that ``place`` belongs to; a forked process has none."""
    world: World | None = None
    narrowed: list[World] = field(default_factory=list)
    """Nested parts of the world whose ranks work without the others."""
    generation: int = 0
    at_open: list[Callable[[], object]] = field(default_factory=list)
    at_close: list[Callable[[], object]] = field(default_factory=list)
    run: tuple[str, list[int]] | None = None
    """Id and ranks (in the job) of the run that this process is in."""
    run_number: int = _NO_RUN
    """The first generation of the run, unique to the run."""
    communicated: float = 0.0
    """Seconds in collectives, in earlier generations of the run."""
    waited: float = 0.0
    """The part of `communicated` in which this rank waited for others."""
    posted: int = 0
    """Bytes of the tensors in operations of earlier generations of the run."""
    disruptions: int = 0
    """Number of aborted generations and of changes of the ranks, as of the last exchange between ranks."""


_state = _State()


def prepare_host() -> Place:
    """Find this process's place, once, for `init` and `open_run`; all ranks of the job call it."""
    return _state.place or _settle(find_place())


def form(formation: int, members: Sequence[int], size: int = 0) -> None:
    """Form ``members`` of the job anew. All of them call this with the same ``formation``, greater than any before.

    The job then has ``size`` ranks, by default as many as before, in new ring memory; tensors in the old one stay
    valid. Ranks keep their numbers; other ranks than members are absent. Needs our supervisor. Raises RingError when a
    member dies meanwhile.
    """
    try:
        _settle(form_again(_state.place, formation, members, size))
    except FormationError as error:
        raise RingError(str(error)) from None


def _settle(place: Place) -> Place:
    left = _state.place
    if left is None:
        _state.process = os.getpid()
        freed_memory.keep()
        atexit.register(_leave_mpi_to_parent)
        at_exit(_leave_job)  # before MPI ends
    else:
        close()
        _state.disruptions += 1
        _leave_run(left, _NO_RUN)  # ranks of the old place may wait for this one
        left.ring_memory.drop_dead()
        _give_memory_back(left)
        left.leave()
    _state.place, _state.generation = place, 0
    report_status("initialized")
    return place


def _give_memory_back(place: Place) -> None:
    """Give freed memory back to the machine: ring memory, and memory that malloc has kept."""
    place.ring_memory.trim()
    freed_memory.give_back()


def has_mpi() -> bool:
    """Whether MPI.COMM_WORLD has the ranks of the job; known only under our supervisor."""
    rendezvous = prepare_host().rendezvous
    return rendezvous is not None and rendezvous.has_mpi


_RANK = "RING_PROCESS_OF_RANK"
"""The variable that tells processes started by a rank that they are no ranks."""


def _is_spawned_by_rank() -> bool:
    """Whether multiprocessing has started this process in a rank. While it imports the script, its parent is unset."""
    rank = os.environ.get(_RANK, "")
    if not rank or rank == str(os.getpid()):
        return False
    parent = multiprocessing.parent_process()
    # Elsewhere these two are the same module, once multiprocessing has been imported.
    imports_script = sys.modules.get("__mp_main__", sys.modules["__main__"]) is not sys.modules["__main__"]
    return imports_script or (parent is not None and str(parent.pid) == rank)


def init(comm: RanksOrComm | None = None) -> None:
    """Open a generation over all ranks of the run, or of the job outside of runs, or over ``comm`` (Horovod: ``init``).

    ``comm`` is None, a list of ranks of the run or job, or an mpi4py communicator; this process must be in it. Does
    nothing when a generation is open that has not been aborted. An elastic job leaves out dead ranks and numbers the
    others again. Raises ValueError for ranks that do not exist or do not include this one, RingError when fewer than
    ``RING_MIN_NP`` are alive, and CollectiveAborted when a rank of the new generation has died or left.
    """
    if _state.world is not None and not _state.world.communicator.aborted:
        return
    if _is_fork():
        raise RingError(
            "this process was forked by a rank; only that rank takes part in collectives: call init() there"
        )
    if _is_spawned_by_rank():
        raise RingError(
            f"this process was started by multiprocessing in a rank (process {os.environ[_RANK]}), for example as a "
            "worker of a DataLoader: only that rank takes part in collectives. Such a process imports the script "
            'again: put what ranks do, init() first, under `if __name__ == "__main__":`'
        )
    os.environ[_RANK] = str(os.getpid())
    close()
    begins = _state.place is None
    # A process that outlives its jobs, such as a worker or an actor, may have another job now.
    place = _settle(find_place()) if not _state.run and is_offered() else prepare_host()
    if begins:  # not an engine, which has its place before: the end of a cell does not end its process
        watch_exits(fail)
    run, everyone = _state.run or (None, list(range(place.topology.size)))
    ranks = everyone if comm is None else ranks_of(comm, place.topology, everyone)
    if place.elastic and place.rendezvous is not None:
        _open_with_the_living(place, place.rendezvous, ranks)
        return
    if ranks == everyone and place.link is not None:
        _state.generation += 1  # across hosts, all ranks of a job or run must call `init` equally often
    else:
        _state.generation = agree(place, ranks, _state.generation, _state.run_number)
    _open(place, ranks, _state.generation, run)


def _open_with_the_living(place: Place, rendezvous: Rendezvous, ranks: list[int]) -> None:
    """Open a generation over the living ranks, which the supervisor knows on every host; repeat if one dies meanwhile.

    Waiting processes are admitted: all ranks first form again, with them.
    """
    while True:
        generation, ranks, formation, size = rendezvous.assemble(ranks, _state.generation, config().timeout)
        _state.generation = generation
        if len(ranks) < config().min_np:
            raise RingError(
                f"{len(ranks)} of {place.topology.size} ranks are left, fewer than the {config().min_np} of "
                "RING_MIN_NP (ringrun --min-np)"
            )
        with suppress(FormationError, CollectiveAborted):  # one of them died before it joined the generation
            if formation > rendezvous.formation:
                place = _settle(form_again(place, formation, ranks, size))
                _state.generation = generation
            _open(place, ranks, generation, None)
            return


def is_joining() -> bool:
    """Whether the next call of `has_just_joined` returns True."""
    rendezvous = _state.place and _state.place.rendezvous
    return bool(rendezvous and rendezvous.joins)


def has_just_joined() -> bool:
    """Whether this process has joined an elastic job that had formed without it; True once."""
    rendezvous = _state.place and _state.place.rendezvous
    joined = bool(rendezvous and rendezvous.joins)
    if rendezvous and joined:
        rendezvous.joins = False
    return joined


def is_updated() -> bool:
    """Whether processes wait to join the job, which they do when all ranks call `init` again."""
    rendezvous = _state.place and _state.place.rendezvous
    return bool(rendezvous and rendezvous.is_updated())


def open_run(run: str, generation: int, ranks: Sequence[int]) -> World:
    """Open ``generation`` over these ranks of the job for a run; all of them call this with the same arguments.

    In the run they are numbered from 0, in this order. ``generation`` grows from run to run, by more than the number of
    `init` calls in a run. Until `close_run`, later `init` calls cover only this run's ranks. A rank that waits here for
    another one can be interrupted.
    """
    close()
    _state.communicated, _state.waited, _state.posted = 0.0, 0.0, 0
    _state.run = (run, list(ranks))
    place = prepare_host()
    _state.generation = max(_state.generation, generation)
    _state.run_number = generation
    return _open(place, list(ranks), generation, run)


def _open(place: Place, ranks: list[int], generation: int, run: str | None) -> World:
    topology = place.topology.part(ranks)
    memories = [place.memories[rank] for rank in ranks]
    own = place.memories[place.topology.rank]
    spans = len(set(memories)) > 1
    order: dict[int, int] = {}
    native = core.Communicator.open(
        place.ring_memory,
        ranks=list(range(len(ranks))),
        local=[place.mates.index(rank) for rank, one in zip(ranks, memories, strict=True) if one == own],
        index=topology.rank,
        generation=generation,
        link=place.link if spans else None,
        host_of=[order.setdefault(one, len(order)) for one in memories] if spans else [],
        addresses=ranks if spans else [],
        timeout=config().timeout,
        run=_state.run_number,
        disruptions=_state.disruptions,
        options=options(warns=run is None),  # a notebook's panel shows the waits
        devices=devices(),
        log=operation_log(),
    )
    _state.disruptions = native.disruptions
    _state.world = World(topology.rank, topology.hosts, Communicator(native, place.ring_memory), tuple(ranks), run)
    for callback in _state.at_open:
        callback()
    return _state.world


def disruptions() -> int:
    """How often the ranks' states may have diverged: the number of aborted generations and changes of the ranks.

    Equal on all ranks of the generation; a new process takes over the number of the others.
    """
    return _state.disruptions


def at_open(callback: Callable[[], object]) -> None:
    """Register ``callback``, to be called whenever this rank has entered a generation."""
    if callback not in _state.at_open:
        _state.at_open.append(callback)


def at_close(callback: Callable[[], object]) -> None:
    """Register ``callback``, to be called whenever this rank is about to leave a generation."""
    if callback not in _state.at_close:
        _state.at_close.append(callback)


def is_initialized() -> bool:
    """Whether a generation is open."""
    return _state.world is not None


def current() -> World:
    """The open generation, or the part of it that `narrow` has made. Raises NotInitializedError when there is none."""
    if _state.world is None:
        raise NotInitializedError("Ring Notebook has not been initialized; call init() first.")
    return _state.narrowed[-1] if _state.narrowed else _state.world


def spans(communicator: Communicator) -> bool:
    """Whether ``communicator`` has all ranks of the open generation, also in a part of it that `narrow` has made."""
    return _state.world is not None and communicator.size == _state.world.size


def is_alone() -> bool:
    return _state.world is not None and _state.world.size == 1


def is_open(world: World | None) -> bool:
    """Whether ``world`` is the open generation or a part of it."""
    return world is not None and (world is _state.world or any(world is part for part in _state.narrowed))


def narrow(ranks: Sequence[int], *, apart: bool = False) -> bool:
    """Make ``ranks`` of `current` the whole world until `widen`; returns whether this rank is one of them.

    ``apart``: each of them becomes a world of its own. All ranks of `current` call this with the same arguments;
    nothing changes on ranks that are not members.
    """
    background_programs.settle()
    whole = current()
    if apart and whole.rank in ranks:
        ranks = [whole.rank]
        communicator: Communicator | None = whole.communicator.group_of_members(ranks, lambda own: [own])
    else:
        communicator = None if apart else whole.communicator.group(ranks)
    if communicator is None:
        return False
    members, part = tuple(whole.ranks[rank] for rank in ranks), whole.part(list(ranks))
    _state.narrowed.append(World(part.rank, part.hosts, communicator, members, whole.run))
    return True


def run_members(run: str) -> tuple[list[int], int]:
    """The ranks (in the job) of ``run`` and its first generation; none while this process is not in it."""
    return (_state.run[1], _state.run_number) if _state.run and _state.run[0] == run else ([], 0)


def widen() -> None:
    background_programs.settle()
    _state.narrowed.pop().communicator.close()


def abort(reason: str) -> None:
    """Abort the generation: on all its ranks, pending and later operations raise CollectiveAborted with ``reason``."""
    if _state.world is not None:
        _state.world.communicator.abort(reason)


def is_aborted() -> bool:
    """Whether a rank has aborted the open generation."""
    return _state.world is not None and _state.world.communicator.aborted


def fail(error: BaseException) -> None:
    """Abort the generation because this rank failed with ``error``; the message names its rank in the run or job.

    Does nothing where another rank has aborted it.
    """
    if _state.world is None or isinstance(error, CollectiveAborted):
        return
    what = f"raised {cause_text(error)[:250]}"
    if isinstance(error, KeyboardInterrupt):
        what = "was interrupted"
    elif isinstance(error, SystemExit):
        what = f"exited with code {exit_code_of(error)}"
    rank = _state.world.ranks[_state.world.rank]
    _note(what, error.__traceback__)
    abort(f"rank {_state.run[1].index(rank) if _state.run else rank} {what}")


def _note(what: str, tb: TracebackType | None = None) -> None:
    """Note ``what`` in the log of operations, with the last line of ``tb`` outside of this package."""
    file, function, line = "", "", 0
    for frame, number in walk_tb(tb):
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            file, function, line = frame.f_code.co_filename, frame.f_code.co_name, number or 0
    assert _state.world is not None
    operation_log().note(what, file, function, line, len(_state.world.ranks), _state.generation & 0xFFFFFFFF)


def close() -> None:
    """Leave the generation, if one is open. Ranks that still wait for this rank raise CollectiveAborted.

    This rank raises it too if an operation failed on its device after its call had returned, and no later call has
    raised.
    """
    if _is_fork():  # the generation belongs to the parent
        _state.world = None
        _state.narrowed.clear()
        return
    if _state.world is not None:
        background_programs.settle()
        for callback in _state.at_close:
            callback()
        _note("left")
    world, _state.world = _state.world, None
    _state.narrowed.clear()
    if world is not None:
        try:
            world.communicator.close()
        finally:
            _state.disruptions += world.communicator.aborted
            spent, waited = world.communicator.seconds_spent()
            _state.communicated, _state.waited = _state.communicated + spent, _state.waited + waited
            _state.posted += world.communicator.bytes_posted()
            _give_memory_back(prepare_host())


def close_run() -> None:
    """Leave the run that `open_run` began, and its generation. Ranks that call `init` in it later see that it left."""
    background_programs.settle()
    number, _state.run, _state.run_number = _state.run_number, None, _NO_RUN
    if number != _NO_RUN:
        _leave_run(prepare_host(), number)
    close()


def _leave_run(place: Place, number: int) -> None:
    place.ring_memory.leave_run(number)


def _leave_job() -> None:
    report_status("exiting")  # first, so that the errors that it causes on other ranks come later
    # At once: other exit handlers of this process may run for long, while ranks wait for it to begin a generation.
    place = prepare_host()
    _leave_run(place, _NO_RUN)
    try:
        close()
    except CollectiveAborted as error:  # a device failed after the last line of the script
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        os._exit(1)  # an exit handler has no other way to make the script fail
    place.leave()


def _is_fork() -> bool:
    return _state.process not in (0, os.getpid())


def _leave_mpi_to_parent() -> None:
    """In a process that a rank has forked: do not finalize MPI at exit, because that waits for all ranks."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and _is_fork():
        core.leave_mpi(str(mpi.__file__))


def communication() -> float:
    """Seconds that this rank has spent in collectives since its run began, including waits for other ranks."""
    world = _state.world
    return _state.communicated + (0.0 if world is None else world.communicator.seconds_spent()[0])


def waiting() -> float:
    """The part of `communication`, in seconds, in which this rank waited for other ranks to call the operation."""
    world = _state.world
    return _state.waited + (0.0 if world is None else world.communicator.seconds_spent()[1])


def sent() -> dict[int, tuple[float, int]]:
    """By rank of `current` on another host: seconds in which data was on its way to it, and the bytes that it has got.

    Linux counts them since a TCP connection was made; empty over other links.
    """
    if _state.place is None or _state.world is None or not isinstance(_state.place.link, core.TcpLink):
        return {}
    number = {rank: index for index, rank in enumerate(_state.world.ranks)}
    return {number[rank]: (seconds, done) for rank, seconds, done in _state.place.link.sent() if rank in number}


def posted() -> int:
    """Bytes of the tensors in collectives that this rank has called since its run began."""
    world = _state.world
    return _state.posted + (0 if world is None else world.communicator.bytes_posted())


def calls() -> int:
    """The number of operations of all ranks that this rank has begun in the generation; 0 when none is open."""
    world = _state.world
    return 0 if world is None else world.communicator.counts()["operations"]


def snapshot() -> list[dict[str, Any]]:
    """The present activity of every rank of the generation; empty when none is open. Any thread may call it."""
    world = _state.world
    return [] if world is None else world.communicator.snapshot()
