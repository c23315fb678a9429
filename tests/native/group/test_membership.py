"""The ranks of one host agree on the number of the next generation."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from native.group.test_death import goes_on
from native.ranks import LIMIT, Dead, Seat, as_processes, as_threads, on_ranks
from ring_notebook.errors import CollectiveAborted, CollectiveTimeout


def call(seat: Seat, last: int, *, timeout: float = LIMIT / 2) -> int:
    return seat.ring_memory.agree_on_generation(list(range(seat.size)), last, 0, timeout)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_come(size: int) -> None:
    """The generation is newer than what any of them has tried, however different that is."""

    def body(seat: Seat) -> list[tuple[int, list[float]]]:
        return [
            (generation := call(seat, 10 * seat.rank + repeat), goes_on(seat.open(generation)))[:2]
            for repeat in (0, 50)
        ]

    sums = [size * (size + 1) / 2] * 2
    newest = 10 * (size - 1)
    assert as_threads(size, body) == [[(newest + 1, sums), (newest + 51, sums)]] * size


@on_ranks(3, as_processes, gives=[None, Dead(signal.SIGKILL), None])
def test_a_death_is_told(seat: Seat) -> None:
    seat.open(1).barrier()
    seat.meet()
    if seat.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    words = rf"rank 1 has died while rank {seat.rank} waits for it to join the next generation"
    with pytest.raises(CollectiveAborted, match=words):
        call(seat, 1)


@on_ranks(2, as_processes)
def test_a_rank_that_does_not_come_is_named(seat: Seat) -> None:
    if seat.rank == 0:
        words = r"rank 0 waited 0\.3 s for rank 1 to join the next generation"
        with pytest.raises(CollectiveTimeout, match=words):
            call(seat, 0, timeout=0.3)


@on_ranks(2)
def test_a_rank_that_has_left_the_run_is_told(seat: Seat) -> None:
    if seat.rank == 0:
        seat.ring_memory.leave_run(7)
    else:
        with pytest.raises(CollectiveAborted, match="rank 0 finished its cell"):
            seat.ring_memory.agree_on_generation([0, 1], 0, 7, LIMIT)


@on_ranks(2, as_processes, gives=[[3.0, 3.0]] * 2)
def test_a_rank_that_gave_up_is_counted_on_again(seat: Seat) -> list[float]:
    """Rank 1 gives up when rank 0 may already count on it: neither waits for the other for ever."""
    last, sums, patience = 0, [0.0], 0
    for _ in range(20):
        sums = []
        while not sums:
            patience = (patience + 1) % 7
            with contextlib.suppress(CollectiveTimeout, CollectiveAborted):
                last = call(seat, last, timeout=1e-4 + 5e-4 * patience if seat.rank else LIMIT / 2)
                sums = goes_on(seat.open(last))
    return sums
