"""Ranks that all wait for one another: a mismatch, whatever they wait in, on one host and on several."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from native.ranks import Seat, as_hosts, as_processes, as_threads, on_ranks
from native.values import Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator, receive, send
from ring_notebook.core.native import core
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch

SOON = 0.1
"""Seconds, instead of those of a job."""
FIRST, SECOND = "allreduce sum 'x' float32 [3]", "allreduce sum 'y' float32 [3]"


def total(ring: Communicator, name: str = "x", *, blocking: bool = True, count: int = 3) -> float:
    """A sum of ones."""
    tensor = Tensor.of(ring, np.ones(count), DType.FLOAT32)
    ring.allreduce([tensor.buffer], [tensor.buffer], name=name, blocking=blocking).wait()
    return float(tensor.values[0])


def message(move: Callable[..., object], count: int) -> Callable[[list[Communicator]], object]:
    """To or from a neighbour that does something else; rank 1 has both others for neighbours."""

    def wait(rings: list[Communicator]) -> object:
        peer = 0 if rings[0].rank == 1 else 1
        return move(rings[0], Tensor.of(rings[0], np.ones(count), DType.FLOAT32).buffer, peer, tag=4)

    return wait


# What a rank waits in, given all ranks and two groups of them; and what the error calls it, by rank.
LANES: dict[str, tuple[Callable[[list[Communicator]], object], str]] = {
    "by order": (lambda rings: total(rings[0]), f"{FIRST}, by order"),
    "by name": (lambda rings: total(rings[0], blocking=False), f"{FIRST}, by name"),
    "by another name": (lambda rings: total(rings[0], "y", blocking=False), f"{SECOND}, by name"),
    "in a group": (lambda rings: total(rings[1], "y"), f"{SECOND} in the group of ranks 0, 1, 2, by order"),
    "by name in a group": (
        lambda rings: total(rings[2], "y", blocking=False),
        f"{SECOND} in the group of ranks 2, 1, 0, by name",
    ),
    "receive": (message(receive, 3), "receive from rank {peer} (tag 4)"),
    "send": (message(send, 100_000), "send to rank {peer} (tag 4)"),
}
PAIRS = [pair for pair in itertools.combinations(LANES, 2) if pair != ("receive", "send")]


@pytest.mark.slow
@pytest.mark.parametrize("launch", [as_threads, as_hosts])
def test_every_pair_of_lanes(launch: Callable[..., object]) -> None:
    """Both are named on all ranks, each soon; the next generation starts clean."""

    def body(seat: Seat) -> None:
        for generation, (first, second) in enumerate(PAIRS, 1):
            ring = seat.open(2 * generation, standstill=SOON)
            groups = [ring.group([0, 1, 2]), ring.group([2, 1, 0])]
            rings = [ring, *(group for group in groups if group is not None)]
            assert total(ring) == 3
            with pytest.raises(CollectiveMismatch) as caught:
                LANES[second if seat.rank == 1 else first][0](rings)
            for lane, peer, ranks in ((first, 1, "ranks 0, 2"), (second, 0, "rank 1")):
                assert f"\n  {ranks}: {LANES[lane][1].format(peer=peer)}" in str(caught.value), (first, second)
            assert str(caught.value).startswith(f"rank {seat.rank}: ")
            ways = {LANES[lane][1].rpartition(", ")[2] for lane in (first, second)}
            assert ("by name (asynchronously" in str(caught.value)) == (ways == {"by order", "by name"})
            with pytest.raises(CollectiveAborted):
                ring.barrier()
            assert total(seat.open(2 * generation + 1)) == 3
            seat.leave(None)
            rings.clear()

    launch(3, body)


@on_ranks(2, as_processes)
def test_ranks_that_are_processes(seat: Seat) -> None:
    """Whose threads are those of one rank each."""
    ring = seat.open(standstill=SOON)
    with pytest.raises(CollectiveMismatch, match="no rank can continue"):
        total(ring, blocking=seat.rank == 0)


@on_ranks(2, as_processes, gives=[2.0, 2.0])
def test_a_rank_outside_of_operations_may_come(seat: Seat) -> float:
    """However long it takes, and whether it sleeps or computes; another thread of a waiting rank may compute, too."""
    ring = seat.open(standstill=SOON)
    if seat.rank == 1:
        time.sleep(10 * SOON)
    total(ring)
    other = threading.Thread(target=lambda: (compute(10 * SOON), total(ring, "z", blocking=False)))
    other.start()
    if seat.rank == 0:
        first = total(ring)
        other.join()
    else:
        other.join()
        first = total(ring)
    return first


def compute(seconds: float) -> None:
    """Keep a core busy."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@on_ranks(3)
def test_ranks_that_left_are_not_waited_for(seat: Seat) -> None:
    """Rank 2 has left in good order, and the other two have called different things."""
    ring = seat.open(standstill=SOON)
    group = ring.group([0, 1])
    if group is None:
        ring.close()
        return
    with pytest.raises(CollectiveMismatch, match="rank 0: allreduce sum 'x'"):
        total(group, blocking=seat.rank == 0)


X, Y, Z = (1, 2, "x, by name"), (2, 2, "x, by order"), (3, 99, "z")
TABLES = [
    ([[(0, [X]), (1, [Y])]], "rank 0: x, by name\n  rank 1: x, by order"),
    ([[(0, [X])], [(1, [Y])]], "rank 0: x, by name\n  rank 1: x, by order"),
    ([[(0, [X]), (1, [X])]], ""),  # all have called it
    ([[(0, [X])], [(1, [X, Y])]], ""),
    ([[(0, [(0, 1, "receive")]), (1, [(0, 1, "receive")])]], "ranks 0, 1: receive"),
    ([[(rank, [(1, 99, "z")]) for rank in range(40)]], "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...: z"),
    ([[(2, [Y]), (4, [Z])], [(0, [Z]), (3, [Z])]], "ranks 0, 3, 4: z\n  rank 2: x, by order"),  # by rank, not host
    (
        [[(rank, [Z]) for rank in range(20, 40)], [(rank, [Z]) for rank in range(20)]],
        "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...: z",
    ),
    ([[(rank, [(1, 30, "z")]) for rank in range(20)], [(20 + rank, [(1, 30, "z")]) for rank in range(10)]], ""),
    ([], ""),
]


@pytest.mark.parametrize(("hosts", "lines"), TABLES)
def test_what_ranks_wait_for(hosts: list[list[tuple[int, list[tuple[int, int, str]]]]], lines: str) -> None:
    """An operation that no rank lacks completes, so that there is no mismatch."""
    text = core.standstill(hosts)
    assert text.partition(":\n  ")[2] == lines
    assert (text == "") == (lines == "")
