"""Operations that match by name: any order, all kinds, fusion, mismatches, ranks that have joined."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from native.calls import ASYNCHRONOUS
from native.names import start, total
from native.over_devices import also_on_devices
from native.ranks import LAUNCHERS, Seat, as_hosts, as_threads, on_ranks
from native.values import Tensor, produced
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.native import core
from ring_notebook.core.work import Work
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch

NAMES = 40
COUNTS = (1, 3, 700, 5003, 70_001)
ONE_HOST_OR_TWO = {"one host": (), "two hosts": (0, 1, 1, 0)}

SMALL = [{"operation": "allreduce", "count": 10}] * 2
DOUBLE = [{"operation": "allreduce", "count": 10, "dtype": DType.FLOAT64}] * 2
JOINED = [{"operation": "allreduce", "count": 10}, {"operation": "join"}]
IN_RING = {"operation": "allreduce", "input_in_ring": True, "output_in_ring": True}
# Of operations whose headers two ranks have posted: which are carried out as one, up to 100 bytes.
FUSION: dict[str, tuple[list[list[dict[str, Any]]], list[list[int]]]] = {
    "alike": ([SMALL, SMALL], [[0, 1]]),
    "up to the threshold": ([SMALL, SMALL, SMALL, SMALL, SMALL], [[0, 1], [2, 3], [4]]),
    "above it": ([[{"operation": "allreduce", "count": 26}] * 2, SMALL], [[0], [1]]),
    "by dtype": ([SMALL, DOUBLE, SMALL], [[0, 2], [1]]),
    "by reduction": ([SMALL, [{**SMALL[0], "op": ReduceOp.MAX}] * 2, SMALL], [[0, 2], [1]]),
    "sums only": ([[{"operation": "barrier"}] * 2, SMALL, [{"operation": "allgather"}] * 2, SMALL], [[0], [1, 3], [2]]),
    "adasum alone": ([[{**SMALL[0], "op": ReduceOp.ADASUM}] * 2] * 2, [[0], [1]]),
    "a mismatch alone": ([SMALL, [SMALL[0], {**SMALL[0], "count": 11}], SMALL], [[0, 2], [1]]),
    "a kind of its own alone": ([SMALL, [SMALL[0], {"operation": "barrier"}], SMALL], [[0, 2], [1]]),
    "whom joined ranks are in": ([SMALL, JOINED, SMALL, JOINED], [[0, 2], [1, 3]]),
    "small in ring memory": ([[{**IN_RING, "count": 10}] * 2] * 2, [[0, 1]]),
}


@pytest.mark.parametrize("case", FUSION)
def test_what_is_fused(case: str) -> None:
    """A pure function of what all ranks know, as a table."""
    posted, operations = FUSION[case]
    headers = [[core.Header(**header) for header in headers] for headers in posted]
    assert core.fuse(headers, 100) == operations


def test_what_is_large_and_in_ring_memory_is_not_fused() -> None:
    """Where the owner of a chunk reads and writes all tensors in place there is nothing to gain."""
    header = core.Header(**IN_RING, count=1 << 14)
    ordinary = core.Header("allreduce", count=1 << 14)
    assert core.fuse([[header] * 2] * 2, 1 << 20) == [[0], [1]]
    assert core.fuse([[header, ordinary]] * 2, 1 << 20) == [[0, 1]]


# What ranks 0, 1, ... say in each round (joins called, names posted with the joins before them), and what is ready.
ROUNDS: dict[str, tuple[list[list[tuple[int, list[tuple[str, int]]]]], list[list[str]]]] = {
    "any order": ([[(0, [("a", 0), ("b", 0)]), (0, [("b", 0), ("a", 0)])]], [["a", "b"]]),
    "when the last has come": ([[(0, [("a", 0)]), (0, [("b", 0)])], [(0, []), (0, [("a", 0)])]], [[], ["a"]]),
    "as first posted": (
        [[(0, [("z", 0)]), (0, [("a", 0)])], [(0, [("a", 0)]), (0, [("z", 0)])]],
        [[], ["z", "a"]],
    ),
    "a name again": ([[(0, [("a", 0)]), (0, [("a", 0)])]] * 2, [["a"], ["a"]]),
    "a joined rank has all": ([[(1, []), (0, [("a", 0), ("b", 0)])]], [["a", "b"]]),
    "also what it lacks": ([[(0, []), (0, [("a", 0)])], [(1, []), (0, [])]], [[], ["a"]]),
    "and nothing of later": ([[(1, []), (1, [("a", 1)])], [(1, [("a", 1)]), (1, [])]], [[], ["a"]]),
    "all have joined": ([[(1, [("a", 0)]), (1, [("b", 0)])]], [["a", "b"]]),
}


@pytest.mark.parametrize("case", ROUNDS)
def test_what_is_ready_after_each_round(case: str) -> None:
    """Equal on all ranks, because all of them read the same news in the same order."""
    rounds, ready = ROUNDS[case]
    assert core.ready_names(2, rounds) == ready


Started = tuple[Communicator, int, Tensor, Work]


def forty(ring: Communicator, groups: list[Communicator], seed: int) -> list[Started]:
    """Start forty names in each of ``groups``, in an order of this rank's own, with unnamed sums among them."""
    order = [(group, number) for group in groups for number in range(NAMES)]
    chance = random.Random(seed * 100 + ring.rank)
    chance.shuffle(order)
    started = []
    for position, (group, number) in enumerate(order):
        if chance.random() < 0.05:
            time.sleep(0.002)  # late
        count = COUNTS[number % len(COUNTS)]
        started.append((group, number, *start(group, f"gradient {number}", float(ring.rank + number), count)))
        if position + 1 in (5, 20, 40):  # also where this rank has the fewest groups
            total(ring)
    chance.shuffle(started)
    return started


def overlapping(ring: Communicator) -> list[Communicator]:
    """The whole, and those of three overlapping groups of four that this rank is in."""
    groups = [ring.group(members) for members in ([0, 1], [1, 2, 3], [3, 0])]
    return [ring, *(group for group in groups if group is not None)]


@pytest.mark.slow
@also_on_devices
@pytest.mark.parametrize("place", ONE_HOST_OR_TWO)
def test_forty_names_in_forty_orders(place: str) -> None:
    """Four ranks, overlapping groups; some late, some twice, some that do not match, an abort in between."""

    def body(seat: Seat) -> dict[str, int]:
        ring = seat.open(1)
        groups = overlapping(ring)
        for seed in range(3):
            started = forty(ring, groups, seed)
            wrong = [start(ring, f"wrong {n}", 1.0, 3 + (n % 4 == ring.rank)) for n in range(4)]
            if ring.rank != seed:
                held = start(ring, "held", 1.0)
                with pytest.raises(ValueError, match=r"'held': an operation of that name is under way"):
                    start(ring, "held", 1.0)
                ring.barrier()
            else:
                ring.barrier()
                held = start(ring, "held", 1.0)
            for n, (_, work) in enumerate(wrong):
                with pytest.raises(
                    CollectiveMismatch, match=rf"rank {ring.rank}: allreduce 'wrong {n}': .*\n"
                ) as caught:
                    work.wait()
                assert f"rank {n}: allreduce sum 'wrong {n}' float32 [4]" in str(caught.value)
            for group, number, tensor, work in started:
                work.wait()
                assert set(tensor.values.tolist()) == {float(sum(group.ranks) + number * group.size)}
            held[1].wait()
            assert held[0].values.tolist() == [4.0] * 3
        counts = ring.named_counts()

        started = forty(ring, groups, 9)
        if ring.rank == 2:
            ring.abort("rank 2 raised ValueError: enough")
        for _, _, _, work in started:
            try:
                work.wait()
            except CollectiveAborted as error:
                assert "enough" in str(error)  # noqa: PT017
        assert ring.aborted

        ring = seat.open(2)
        for group, number, tensor, work in forty(ring, [ring], 10):
            work.wait()
            assert set(tensor.values.tolist()) == {float(sum(group.ranks) + number * group.size)}
        return counts

    found = as_threads(4, body, hosts=ONE_HOST_OR_TWO[place])
    assert len({tuple(counts[what] for what in ("rounds", "names", "operations")) for counts in found}) == 1
    assert found[0]["names"] == 3 * (NAMES + 4 + 1)
    assert found[0]["operations"] < found[0]["names"]


@also_on_devices
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_fused_as_far_as_the_threshold_goes(launcher: str) -> None:
    """What is ready together is one operation; where no two fit, each is one. Ranks may differ in the threshold."""

    def body(seat: Seat) -> list[dict[str, int]]:
        found = []
        for generation, threshold in ((1, 1 << 20), (2, 12 if seat.rank else 1 << 20)):
            ring = seat.open(generation, fusion_threshold=threshold)
            first = start(ring, "first", 1.0) if ring.rank else None
            ring.barrier()
            started = [start(ring, f"{n}", float(n)) for n in range(20)]
            ring.barrier()
            for n, (tensor, work) in enumerate([*started, first or start(ring, "first", 1.0)]):
                work.wait()
                assert tensor.values.tolist() == [float(n if n < 20 else 1) * ring.size] * 3
            found.append(ring.named_counts())
        return found

    for fused, alone in LAUNCHERS[launcher](3, body):
        assert fused["names"] == alone["names"] == alone["operations"] == 21
        assert fused["operations"] < 21


@also_on_devices
@pytest.mark.parametrize("call", ASYNCHRONOUS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
@on_ranks(3)
def test_every_kind(seat: Seat, launcher: str, call: str) -> None:
    """All that can be queued matches by name, beside unnamed operations in another order on each rank."""
    ring = seat.open()
    names = [f"{call} {n}" for n in range(3)]
    works = [named(ring, call, name) for name in (names if seat.rank % 2 else names[::-1])]
    total(ring)
    for work in works:
        work.wait()
    assert ring.named_counts()["names"] == 3


def named(ring: Communicator, call: str, name: str) -> Work:
    """Start the operation with a name."""

    class Named:
        """The communicator, with a name for what is started."""

        def __getattr__(self, attribute: str) -> Any:
            found = getattr(ring, attribute)
            if attribute in ("allreduce", "reducescatter", "allgather", "broadcast", "alltoall", "barrier"):
                return lambda *args, **options: found(*args, **options, name=name)
            return found

    return ASYNCHRONOUS[call](Named(), False)  # type: ignore[arg-type]


@also_on_devices
@pytest.mark.parametrize("launcher", LAUNCHERS)
@on_ranks(3)
def test_results_by_name(seat: Seat, launcher: str) -> None:
    """What an operation produces reaches the one that was started, in whatever order they were."""
    ring = seat.open()
    chance = random.Random(seat.rank)
    kinds = ["gathered", "exchanged", "scattered", "from 1"]
    chance.shuffle(kinds)
    mine = Tensor.of(ring, np.arange(seat.size) + 10 * seat.rank, DType.INT64)
    part, sent = Tensor.of(ring, np.zeros(1), DType.INT64), Tensor.of(ring, np.array([seat.rank]), DType.INT64)
    calls: dict[str, Callable[[], Work]] = {
        "gathered": lambda: ring.allgather(mine.buffer, name="gathered", blocking=False),
        "exchanged": lambda: ring.alltoall([mine.buffer], [1] * seat.size, name="exchanged", blocking=False),
        "scattered": lambda: ring.reducescatter(mine.buffer, part.buffer, name="scattered", blocking=False),
        "from 1": lambda: ring.broadcast(sent.buffer, sent.buffer, 1, name="from 1", blocking=False),
    }
    works = {kind: calls[kind]() for kind in kinds}
    for work in works.values():
        work.wait()
    numbers = np.arange(seat.size)
    everything = (numbers[:, None] * 10 + numbers).ravel()
    assert np.frombuffer(produced(works["gathered"]), np.int64).tolist() == everything.tolist()
    assert np.frombuffer(produced(works["exchanged"]), np.int64).tolist() == (numbers * 10 + seat.rank).tolist()
    assert part.values.tolist() == [sum(10 * r + seat.rank for r in range(seat.size))]
    assert sent.values.tolist() == [1]


@also_on_devices
@pytest.mark.parametrize("launcher", LAUNCHERS)
@on_ranks(3)
def test_a_mismatch_of_names(seat: Seat, launcher: str) -> None:
    """Another kind, dtype, reduction or root under one name: an error on all ranks that shows both; others live on."""
    ring = seat.open()
    odd = seat.rank == 1
    own = Tensor.of(ring, np.ones(3), DType.FLOAT64 if odd else DType.FLOAT32).buffer
    ones = Tensor.of(ring, np.ones(3), DType.FLOAT32).buffer
    op = ReduceOp.MAX if odd else ReduceOp.SUM
    good = start(ring, "good", 1.0)
    works = {
        "kind": ring.barrier(name="kind", blocking=False)
        if odd
        else ring.allreduce([ones], [ones], name="kind", blocking=False),
        "dtype": ring.allreduce([own], [own], name="dtype", blocking=False),
        "reduction": ring.allreduce([ones], [ones], op=op, name="reduction", blocking=False),
        "root": ring.broadcast(ones, ones, int(odd), name="root", blocking=False),
    }
    texts = {
        "kind": "rank 1: barrier 'kind'",
        "dtype": r"rank 1: allreduce sum 'dtype' float64 \[3\]",
        "reduction": r"rank 1: allreduce max 'reduction' float32 \[3\]",
        "root": r"rank 1: broadcast 'root' float32 \[3\]( on cuda)? from rank 1",
    }
    for what, work in works.items():
        with pytest.raises(CollectiveMismatch, match=texts[what]):
            work.wait()
    good[1].wait()
    assert good[0].values.tolist() == [float(seat.size)] * 3
    total(ring)
    again = start(ring, "kind", 2.0)
    again[1].wait()
    assert again[0].values.tolist() == [2.0 * seat.size] * 3


@also_on_devices
@pytest.mark.parametrize("launcher", LAUNCHERS)
@on_ranks(3)
def test_join_beside_names(seat: Seat, launcher: str) -> None:
    """A rank that has joined adds nothing to what others start by name; all learn who came last, and go on."""
    ring = seat.open()
    for _ in range(3):
        started = [start(ring, f"step {step}", 1.0, 30_000) for step in range(seat.rank + 1)]
        random.Random(seat.rank).shuffle(started)
        started[0][1].wait()
        last = ring.join().last_rank()
        assert last in range(seat.size)
        for tensor, work in started:
            work.wait()
            assert tensor.values[0] in range(1, seat.size + 1)
        sums = sorted(float(tensor.values[0]) for tensor, _ in started)
        assert sums == sorted(float(seat.size - step) for step in range(seat.rank + 1))
    own = Tensor.of(ring, np.ones(3), DType.FLOAT32).buffer
    if seat.rank == 0:
        with pytest.raises(CollectiveMismatch, match="has joined"):  # in which those that join take no part
            ring.allgather(own)
    ring.join()
    both = [start(ring, f"after {n}", 1.0) for n in range(3)]
    for tensor, work in both:
        work.wait()
        assert tensor.values.tolist() == [float(seat.size)] * 3


@also_on_devices
@pytest.mark.parametrize("launcher", LAUNCHERS)
@on_ranks(3)
def test_join_where_no_two_started_the_same(seat: Seat, launcher: str) -> None:
    """Nobody waits for anybody: each rank's name is complete because all others have joined."""
    ring = seat.open()
    tensor, work = start(ring, f"of rank {seat.rank}", 7.0)
    ring.join()
    work.wait()
    assert tensor.values.tolist() == [7.0] * 3
    total(ring)


@also_on_devices
@on_ranks(2)
def test_long_names_are_told_apart(seat: Seat) -> None:
    """A header has room for the beginning of a name only."""
    ring = seat.open()
    names = ["x" * 200 + str(n) for n in range(5)]
    started = {name: start(ring, name, float(len(name) + int(name[-1]))) for name in names[:: 1 - 2 * seat.rank]}
    for name, (tensor, work) in started.items():
        work.wait()
        assert tensor.values[0] == 2.0 * (len(name) + int(name[-1]))


@also_on_devices
def test_many_more_names_than_a_round_tells() -> None:
    """In orders that are the reverse of one another, so that all of them wait at once."""

    def body(seat: Seat) -> dict[str, int]:
        ring = seat.open()
        started = {n: start(ring, f"{n}", float(n)) for n in list(range(1000))[:: 1 - 2 * seat.rank]}
        for n, (tensor, work) in started.items():
            work.wait()
            assert tensor.values[0] == 2.0 * n
        return ring.named_counts()

    first, second = as_threads(2, body)
    assert first == second
    assert first["operations"] < first["names"] == 1000


@also_on_devices
@on_ranks(7, as_hosts)
def test_all_hosts_of_three(seat: Seat) -> None:
    """With unequal numbers of ranks on each."""
    ring = seat.open()
    for _, number, tensor, work in forty(ring, [ring], 4):
        work.wait()
        assert set(tensor.values.tolist()) == {float(sum(range(seat.size)) + number * seat.size)}
