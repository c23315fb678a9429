"""The living ranks of one host agree on the members of the next epoch, at whatever moment others die."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from native.group.test_death import goes_on
from native.ranks import LIMIT, Dead, Seat, as_processes, as_threads
from native.values import Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.errors import CollectiveAborted, CollectiveTimeout


def call(seat: Seat, last: int, *, without_dead: bool = True, timeout: float = LIMIT / 2) -> tuple[int, list[int]]:
    epoch, members = seat.domain.agree_on_members(list(range(seat.size)), last, 0, without_dead, timeout)
    return epoch, members


def open_with_the_living(seat: Seat, last: int) -> tuple[int, list[int], list[float]]:
    """As an elastic job does it: agree on members until their epoch opens and works."""
    while True:
        last, members = call(seat, last)
        with contextlib.suppress(CollectiveAborted):
            return last, members, goes_on(seat.open(last, ranks=members))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_come(size: int) -> None:
    """The epoch is newer than what any of them has tried, however different that is."""

    def body(seat: Seat) -> list[tuple[int, list[int], list[float]]]:
        return [open_with_the_living(seat, 10 * seat.rank + repeat) for repeat in (0, 50)]

    everyone, sums = list(range(size)), [size * (size + 1) / 2] * 2
    newest = 10 * (size - 1)
    assert as_threads(size, body) == [[(newest + 1, everyone, sums), (newest + 51, everyone, sums)]] * size


@pytest.mark.parametrize("victims", [[0], [2], [0, 1], [0, 2], [1, 2, 3]])
def test_the_dead_are_left_out(victims: list[int]) -> None:
    def body(seat: Seat) -> Any:
        seat.open(1).barrier()
        seat.meet()
        if seat.rank in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        return open_with_the_living(seat, 1)

    living = [rank for rank in range(4) if rank not in victims]
    total = sum(range(1, len(living) + 1))
    results = as_processes(4, body)
    assert [results[rank] for rank in victims] == [Dead(signal.SIGKILL)] * len(victims)
    assert [results[rank][1:] for rank in living] == [(living, [total, total])] * len(living)
    assert len({results[rank][0] for rank in living}) == 1


@pytest.mark.parametrize("seed", range(20))
def test_deaths_at_any_moment(seed: int) -> None:
    """Up to three of five ranks are killed within a few ms, while they agree, open the epoch or are in between."""
    chance = random.Random(seed)
    ends = {rank: chance.uniform(0.0, 0.02) for rank in chance.sample(range(5), chance.randint(1, 3))}

    def body(seat: Seat) -> Any:
        seat.open(1).barrier()
        seat.meet()
        if seat.rank in ends:
            threading.Timer(ends[seat.rank], os.kill, (os.getpid(), signal.SIGKILL)).start()
        last, deadline = 1, time.monotonic() + 0.1
        while True:
            last, members, sums = open_with_the_living(seat, last)
            assert sums == [len(members) * (len(members) + 1) / 2] * 2
            # All stop together, or one would wait for those that have.
            more = Tensor.of(seat.opened[-1], np.array([time.monotonic() < deadline]), DType.INT64)
            try:
                seat.opened[-1].allreduce([more.buffer], [more.buffer])
            except CollectiveAborted:
                continue
            if not more.values[0] and len(members) == 5 - len(ends):
                return members

    living = [rank for rank in range(5) if rank not in ends]
    results = as_processes(5, body)
    assert [results[rank] for rank in living] == [living] * len(living)


def test_where_a_death_ends_the_job_it_is_told() -> None:
    def body(seat: Seat) -> None:
        seat.open(1).barrier()
        seat.meet()
        if seat.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        words = rf"rank 1 has died while rank {seat.rank} waits for it to join the next epoch"
        with pytest.raises(CollectiveAborted, match=words):
            call(seat, 1, without_dead=False)

    assert as_processes(3, body) == [None, Dead(signal.SIGKILL), None]


def test_a_rank_that_does_not_come_is_named() -> None:
    def body(seat: Seat) -> None:
        if seat.rank == 0:
            words = r"rank 0 waited 0\.3 s for rank 1 to join the next epoch"
            with pytest.raises(CollectiveTimeout, match=words):
                call(seat, 0, timeout=0.3)

    as_processes(2, body)


def test_a_rank_that_has_left_the_run_is_told() -> None:
    def body(seat: Seat) -> None:
        if seat.rank == 0:
            seat.domain.leave_run(7)
        else:
            with pytest.raises(CollectiveAborted, match="rank 0 finished its cell"):
                seat.domain.agree_on_members([0, 1], 0, 7, True, LIMIT)

    as_threads(2, body)


def test_a_rank_that_gave_up_is_counted_on_again() -> None:
    """Rank 1 gives up when rank 0 may already count on it: neither waits for the other for ever."""

    def body(seat: Seat) -> list[float]:
        last, sums, patience = 0, [0.0], 0
        for _ in range(20):
            if seat.rank == 0:
                last, _, sums = open_with_the_living(seat, last)
                continue
            sums = []
            while not sums:
                patience = (patience + 1) % 7
                with contextlib.suppress(CollectiveTimeout, CollectiveAborted):
                    last, members = call(seat, last, timeout=1e-4 + 5e-4 * patience)
                    sums = goes_on(seat.open(last, ranks=members))
        return sums

    assert as_processes(2, body) == [[3.0, 3.0]] * 2
