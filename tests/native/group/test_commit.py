"""A commit, and what else takes one gate, completes on all ranks of a host or on none, whatever ends it and when."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from native.bindings.test_tensor_reader import READER
from native.calls import Guard
from native.ranks import Body, Seat, as_hosts, as_processes, as_threads, on_ranks
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch, CollectiveTimeout
from ring_notebook.torch.tensors import buffer_of

SCHEDULES = 2_000


def commits(ring: Communicator) -> bool:
    """Whether a commit has succeeded here. Where it has not, it has raised."""
    guard = Guard()
    try:
        ring.commit(guard, name="step")
    except CollectiveAborted:
        assert not guard.held
        return False
    assert guard.held
    return True


def test_all_ranks_commit_and_the_group_lives_on() -> None:
    def body(seat: Seat) -> None:
        ring = seat.open()
        for _ in range(3):
            assert commits(ring)
            ring.barrier()

    as_threads(3, body)
    as_hosts(5, body)


def completes(ring: Communicator, call: str) -> bool:
    """Whether an operation of one gate has completed here. Where it has not, it has raised."""
    if call == "commit":
        return commits(ring)
    values = torch.ones(2)
    tensor = buffer_of(values)
    try:
        if call == "allreduce":
            ring.allreduce([tensor], [tensor])
        elif call == "queued":
            ring.allreduce([tensor], [tensor], blocking=False).wait()
        elif call == "small" and READER is not None:
            ring.allreduce_tensors(READER, values, values, ReduceOp.SUM, 1.0, 1.0, "")
        elif call == "started" and READER is not None:
            work = ring.start_tensors(READER, values, ReduceOp.SUM, 1.0, 1.0, "")
            assert work is not None
            work.wait()
        elif call == "broadcast":
            ring.broadcast(tensor, tensor, root=1)
        elif call == "allgather":
            ring.allgather(tensor)
        else:
            ring.barrier()
    except CollectiveAborted:
        return False
    assert values.tolist() == [ring.size if call in SUMS else 1.0] * 2
    return True


SUMS = ("allreduce", "queued", *(("small", "started") if READER is not None else ()))
CALLS = ("commit", "broadcast", "allgather", "barrier", *SUMS)


@dataclass
class Schedule:
    """What a seed draws; the rest is the machine's scheduler, with a thread for each rank."""

    calls: list[str]
    delays: list[list[int]]
    """Microseconds before each commit, by rank."""
    aborter: int
    after: int
    """Commits that this rank has made when it starts the thread that ends the generation; all in some schedules."""
    pause: int
    """Microseconds from there until that thread ends the generation, whatever the rank does then."""

    @classmethod
    def draw(cls, seed: int, size: int, of: Sequence[str]) -> Schedule:
        dice = random.Random(seed)
        delays = [[dice.choice((0, 0, 1, 20, 60)) for _ in range(3)] for _ in range(size)]
        calls = [dice.choice(of) for _ in range(dice.randrange(1, 4))]
        after = min(dice.choice((0, 0, 0, 1, 2, len(calls))), len(calls))
        return cls(calls, delays, dice.randrange(size), after, dice.choice((0, 5, 20, 40, 80, 150)))


def idle(microseconds: int) -> None:
    end = time.perf_counter_ns() + 1000 * microseconds
    while time.perf_counter_ns() < end:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "calls", "count"),
    [
        pytest.param(as_threads, ("commit",), SCHEDULES, id="commits"),
        pytest.param(as_threads, CALLS, SCHEDULES, id="one-gate"),
        pytest.param(as_hosts, ("commit",), 40, id="hosts"),
    ],
)
def test_random_schedules_never_part_the_ranks(
    launch: Callable[[int, Body], object], calls: Sequence[str], count: int
) -> None:
    """In each an abort strikes at some moment of a few calls, or while others are still opening the generation."""
    size = 3
    schedules = [Schedule.draw(seed, size, calls) for seed in range(count)]
    made = [[-1] * count for _ in range(size)]  # what opens the generation is one too

    def end(ring: Communicator, pause: int) -> None:
        idle(pause)
        ring.abort("an interrupt")

    def body(seat: Seat) -> None:
        for number, schedule in enumerate(schedules):
            ring = seat.open(number + 1)
            made[seat.rank][number] = 0
            ender = threading.Thread(target=end, args=(ring, schedule.pause))
            aborts = seat.rank == schedule.aborter
            for turn, call in enumerate(schedule.calls):
                if aborts and turn == schedule.after:
                    ender.start()
                idle(schedule.delays[seat.rank][turn])
                if not completes(ring, call):
                    break
                made[seat.rank][number] += 1
            if aborts:
                if ender.ident is None:
                    ender.start()
                ender.join()
            ring.close()
            seat.opened.clear()

    launch(size, body)
    parted = [number for number in range(count) if len({counts[number] for counts in made}) > 1]
    assert not parted, [(schedules[number], [counts[number] for counts in made]) for number in parted[:3]]
    ended = sum(made[0][number] < len(schedules[number].calls) for number in range(count))
    assert count / 50 < ended < count  # aborts do strike, and not those after the last call


@on_ranks(3)
def test_a_rank_that_calls_something_else_is_a_mismatch_and_the_group_lives_on(seat: Seat) -> None:
    ring = seat.open()
    with pytest.raises(CollectiveMismatch, match="commit 'step'"):
        ring.barrier() if seat.rank == 1 else ring.commit(name="step")
    assert commits(ring)


@on_ranks(3)
def test_a_rank_that_does_not_come_in_time_ends_it_for_all(seat: Seat) -> None:
    ring = seat.open()
    ring.limit_time(0.2)
    seat.meet()
    if seat.rank == 1:
        time.sleep(1)
    else:
        with pytest.raises((CollectiveTimeout, CollectiveAborted)):
            ring.commit(name="step")


@on_ranks(3)
def test_a_rank_that_has_joined_stands_in_no_ones_way(seat: Seat) -> None:
    ring = seat.open()
    if seat.rank:
        for _ in range(3):
            assert commits(ring)
    ring.join()


def test_a_rank_that_dies_while_others_commit() -> None:
    """They learn it, and agree."""

    def body(seat: Seat) -> bool:

        ring = seat.open()
        seat.meet()
        if seat.rank == 1:
            time.sleep(0.1)
            os.kill(os.getpid(), 9)
        return commits(ring)

    assert [found for found in as_processes(3, body) if isinstance(found, bool)] == [False, False]


@on_ranks(5, as_hosts, gives=[59] * 5)
def test_between_hosts_an_abort_behind_a_commit_ends_it_on_none(seat: Seat) -> int:
    """A rank that has made its step ends the generation at once, while the message to the other host is on its way."""
    made = 0
    for number in range(1, 60):
        ring = seat.open(number)
        if commits(ring):
            made += 1
        if seat.rank == number % seat.size:
            ring.abort("an interrupt behind the step")
        ring.close()
        seat.opened.clear()
    return made


def test_ranks_get_the_newest_change_that_all_have() -> None:
    """The least of their numbers; 0 while a rank has joined, because it takes no step."""

    def body(seat: Seat) -> None:
        ring = seat.open()
        agreed = []
        for numbers in ([5, 5, 5, 5], [7, 5, 6, 9], [7, 0, 6, 9], [1 << 60, 8, 1 << 60, 8]):
            guard = Guard()
            ring.commit(guard, name="step", newest=numbers[seat.rank])
            assert guard.held
            agreed.append(guard.agreed)
        assert agreed == [5, 5, -1 if seat.rank == 1 else 0, 8]  # a rank without a change is told nothing
        if seat.rank == 0:
            ring.join().wait()
        else:
            guard = Guard()
            ring.commit(guard, newest=9)
            assert guard.agreed == 0
            ring.join().wait()

    as_threads(4, body)
    as_hosts(4, body)
