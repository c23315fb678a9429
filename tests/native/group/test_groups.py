"""Groups, several generations at once, and asynchronous operations: order, overlap and join."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from native.collectives.matrix import SIZES
from native.names import total
from native.over_devices import also_on_devices
from native.ranks import LAUNCHERS, Seat, as_threads, on_ranks
from native.values import Tensor, produced
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.work import Work
from ring_notebook.errors import CollectiveMismatch


@also_on_devices
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("launcher", LAUNCHERS)
@on_ranks()
def test_groups_nested_and_overlapping(seat: Seat, launcher: str, size: int) -> None:
    """Every pair of ranks, the evens, the reversed whole and a group inside a group; roots are group ranks."""
    ring = seat.open()
    for members in [*itertools.combinations(range(size), 2), range(0, size, 2), range(size - 1, -1, -1)]:
        group = ring.group(list(members))
        assert (group is None) == (ring.rank not in members)
        if group is None:
            continue
        assert group.ranks == tuple(members)
        assert group.rank == list(members).index(ring.rank)
        total(group)
        tensor = Tensor.of(group, np.array([float(ring.rank)]), DType.FLOAT64)
        group.broadcast(tensor.buffer, tensor.buffer, group.size - 1)
        assert tensor.values[0] == list(members)[-1]
        inner = group.group([0])
        if inner is not None:
            total(inner)
            inner.close()
        group.close()
    total(ring)


@pytest.mark.parametrize("hosts", [(), (0, 0, 1, 1), (0, 1, 1, 1)], ids=["one host", "two and two", "one and three"])
def test_groups_that_their_members_make_alone(hosts: tuple[int, ...]) -> None:
    """No other rank takes part, and members may make several groups at once with different mates."""
    cards: dict[tuple[tuple[int, ...], int], Any] = {}
    come = threading.Condition()

    def make(ring: Communicator, ranks: list[int]) -> Communicator:
        def exchange(card: Any) -> list[Any]:
            keys = [(tuple(ranks), rank) for rank in ranks]
            with come:
                cards[tuple(ranks), ring.rank] = card
                come.notify_all()
                assert come.wait_for(lambda: all(key in cards for key in keys), 30)
                return [cards[key] for key in keys]

        return ring.group_of_members(ranks, exchange)

    def body(seat: Seat) -> None:
        ring = seat.open()
        for ranks in ([3, 1], [0, 2], [1, 2, 3], [2], [0, 1, 2, 3]):
            if ring.rank not in ranks:
                continue
            group = make(ring, ranks)
            assert group.ranks == tuple(ranks)
            total(group)
            total(group, count=100_000)
            group.close()
        total(ring)

    as_threads(4, body, hosts=hosts)


@on_ranks(2)
def test_a_group_of_others(seat: Seat) -> None:
    with pytest.raises(ValueError, match="only its members make it"):
        seat.open().group_of_members([1 - seat.rank], lambda card: [card])


@pytest.mark.parametrize("ranks", [[], [0, 0], [0, 2], [-1]])
@on_ranks(2)
def test_a_group_of_impossible_ranks(seat: Seat, ranks: list[int]) -> None:
    """ValueError that shows the ranks, before anything is sent."""
    ring = seat.open()
    with pytest.raises(ValueError, match="distinct ranks between 0 and 1"):
        ring.group(ranks)
    total(ring)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@on_ranks(3)
def test_a_group_of_ranks_that_differ(seat: Seat, launcher: str) -> None:
    """Every rank reads which rank differs, also one that is in no group; afterwards groups can be made."""
    ring = seat.open()
    for _ in range(2):
        with pytest.raises(CollectiveMismatch) as caught:
            ring.group([1, 0] if ring.rank == 1 else [0, 1])
        own, other = ([1, 0], 0) if ring.rank == 1 else ([0, 1], 1)
        assert f"rank {ring.rank}: expected a group of ranks {own}, and rank {other} passed" in str(caught.value)
        total(ring.group([2, 1, 0]) or ring)


@also_on_devices
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("launcher", LAUNCHERS)
@on_ranks()
def test_groups_in_another_order_on_each_rank(seat: Seat, launcher: str, size: int) -> None:
    """Operations of overlapping groups start in a random order on each rank: each group has its own, so none waits."""
    ring = seat.open()
    pairs = list(itertools.combinations(range(size), 2))
    groups = [group for group in [ring.group(pair) for pair in pairs] if group is not None]
    order = [group for group in [ring, *groups] for _ in range(10)]
    random.Random(seat.rank).shuffle(order)
    started: list[tuple[Communicator, Tensor, Work]] = []
    for group in order:
        tensor = Tensor.of(group, np.full(30_000, float(seat.rank)), DType.FLOAT32)
        started.append((group, tensor, group.allreduce([tensor.buffer], [tensor.buffer], blocking=False)))
    random.Random(-seat.rank).shuffle(started)
    for group, tensor, work in started:
        work.wait()
        assert set(tensor.values.tolist()) == {float(sum(group.ranks))}


@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks()
def test_several_generations_in_one_process(seat: Seat, size: int) -> None:
    """Communicators of different generations live side by side; the end of one leaves the other alone."""
    first, second = seat.open(1), seat.open(2)
    total(first)
    total(second)
    first.barrier()
    total(second)
    if seat.rank == 0:
        first.abort("enough of the first")
    total(second)
    total(seat.open(3))


@also_on_devices
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("launcher", LAUNCHERS)
@on_ranks()
def test_a_mix_of_queued_and_blocking_operations(seat: Seat, launcher: str, size: int) -> None:
    """A blocking operation behind queued ones keeps its place; handles may be dropped; all kinds can be queued."""
    ring = seat.open()
    for step in range(30):
        tensors = [Tensor.of(ring, np.full(100 * step, 1.0), DType.FLOAT64) for _ in range(3)]
        works = [ring.allreduce([t.buffer], [t.buffer], blocking=False) for t in tensors]
        works.append(ring.barrier(blocking=False))
        total(ring)
        own = Tensor.of(ring, np.array([seat.rank]), DType.INT64)
        gathered = ring.allgather(own.buffer, blocking=False)
        exchanged = ring.alltoall([Tensor.of(ring, np.arange(size), DType.INT64).buffer], [1] * size, blocking=False)
        received = Tensor.of(ring, np.full(4, seat.rank), DType.INT32)
        ring.broadcast(received.buffer, received.buffer, step % size, blocking=False)  # nobody keeps this one
        total(ring)
        assert set(received.values.tolist()) == {step % size}
        gathered.wait()
        exchanged.wait()
        assert np.frombuffer(produced(gathered), np.int64).tolist() == list(range(size))
        assert np.frombuffer(produced(exchanged), np.int64).tolist() == [seat.rank] * size
        for work, tensor in zip(works, tensors, strict=False):
            assert work.done()
            assert set(tensor.values.tolist()) <= {float(size)}


@also_on_devices
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("launcher", LAUNCHERS)
@on_ranks()
def test_join(seat: Seat, launcher: str, size: int) -> None:
    """Ranks with less data contribute zeros and Average divides by all; everybody learns who came last."""
    ring = seat.open()
    for count, ring_memory in ((3, False), (60_000, False), (60_000, True)):
        for step in range(seat.rank + 1):
            tensor = Tensor.of(ring, np.ones(count), DType.FLOAT32, ring=ring_memory)
            ring.allreduce([tensor.buffer], [tensor.buffer])
            assert set(tensor.values.tolist()) == {float(size - step)}
            ring.allreduce([tensor.buffer], [tensor.buffer], op=ReduceOp.AVERAGE)
            np.testing.assert_allclose(tensor.values, (size - step) ** 2 / size, rtol=1e-6)
            ring.barrier()
        assert ring.join().last_rank() == size - 1
    total(ring)


@also_on_devices
@pytest.mark.parametrize("hosts", [(), (0, 1, 1)])
@pytest.mark.parametrize("last", range(3))
@on_ranks(3)
def test_join_names_the_rank_that_came_last(seat: Seat, last: int, hosts: tuple[int, ...]) -> None:
    """Also where nobody has made more steps than another, and where a rank's own names are still under way."""
    ring = seat.open()
    for named in (False, True):
        if seat.rank == last:
            time.sleep(0.1)
        if named and seat.rank == (last + 1) % 3:
            tensor = Tensor.of(ring, np.ones(2), DType.FLOAT32)
            ring.allreduce([tensor.buffer], [tensor.buffer], name="its own", blocking=False)
        assert ring.join().last_rank() == last


@also_on_devices
@pytest.mark.parametrize("hosts", [(), (0, 1, 1)])
@on_ranks(3)
def test_a_joined_rank_stays_joined(seat: Seat, hosts: tuple[int, ...]) -> None:
    """What zeros make no sense for raises on the ranks that call it alone, whether it has a name or not."""
    ring = seat.open()
    total(ring)  # connects devices, which a rank that has joined cannot
    tensor = Tensor.of(ring, np.ones(2), DType.FLOAT32)
    calls: dict[str, Callable[..., Work]] = {
        "allgather": lambda **options: ring.allgather(tensor.buffer, **options),
        "broadcast": lambda **options: ring.broadcast(tensor.buffer, tensor.buffer, 0, **options),
        "allreduce min": lambda **options: ring.allreduce([tensor.buffer], [tensor.buffer], op=ReduceOp.MIN, **options),
    }
    if ring.rank != 1:
        for name, call in calls.items():
            for options in ({}, {"name": "a name", "blocking": False}):
                with pytest.raises(CollectiveMismatch, match="a joined rank takes part in") as caught:
                    call(**options).wait()
                assert f"ranks 0, 2: {name}" in str(caught.value)
                assert "rank 1: join" in str(caught.value)
                both = Tensor.of(ring, np.ones(2), DType.FLOAT32)
                ring.allreduce([both.buffer], [both.buffer])
                assert both.values.tolist() == [2.0, 2.0]
        if ring.rank == 0:
            time.sleep(0.05)
    assert ring.join().last_rank() == 0
    total(ring)


@on_ranks(2, hosts=(0, 1))
def test_messages_of_groups_stay_apart(seat: Seat) -> None:
    """Groups of the same ranks on two hosts, whose operations are under way in another order on each of them."""
    ring = seat.open()
    parents = [ring.group([0, 1]) for _ in range(2)]
    assert parents[0] is not None
    for _ in range(31):  # so that their next operations are as many apart
        parents[0].barrier()
    groups = [parent.group([0, 1]) for parent in parents if parent is not None]
    tensors = [Tensor.of(ring, np.array([(seat.rank + 1) * 10.0**i]), DType.FLOAT32) for i in range(2)]
    works = []
    for i in range(2):
        group, tensor = groups[i ^ seat.rank], tensors[i ^ seat.rank]
        assert group is not None
        works.append(group.allreduce([tensor.buffer], [tensor.buffer], blocking=False))
        time.sleep(0.05)  # until its message is on the way
    for work in works:
        work.wait()
    assert [tensor.values[0] for tensor in tensors] == [3.0, 30.0]


def test_an_operation_has_no_result_before_it_is_done() -> None:
    """A rank that looks too early is told so, instead of reading what is being written."""
    looked = threading.Event()

    def body(seat: Seat) -> None:
        ring = seat.open()
        own = Tensor.of(ring, np.array([seat.rank]), DType.INT32)
        if seat.rank == 1:
            assert looked.wait(60)
        work = ring.allgather(own.buffer, blocking=False)
        if seat.rank == 0:
            for look in (work.output, work.counts, work.last_rank):
                with pytest.raises(ValueError, match="no result before it is done"):
                    look()
            looked.set()
        work.wait()
        assert np.frombuffer(work.output(), np.int32).tolist() == [0, 1]

    as_threads(2, body)


@on_ranks(2)
def test_a_failed_operation_has_no_result(seat: Seat) -> None:
    """Reading the output raises the error again; there are no bytes to return."""
    ring = seat.open()
    own = Tensor.of(ring, np.ones(3), DType.INT32 if seat.rank else DType.INT64)
    work = ring.allgather(own.buffer, blocking=False)
    for look in (work.wait, work.output, work.counts, work.last_rank):
        with pytest.raises(CollectiveMismatch, match="call it with the same dtype on every rank"):
            look()
