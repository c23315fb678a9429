"""Messages from rank to rank: order, tags, sizes on both sides of each limit, errors on both sides, and never stuck."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from native.ranks import Seat, as_threads, on_ranks
from native.values import Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import ANY, Communicator, receive, send
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch, CollectiveTimeout

COUNTS = [0, 1, 16 << 10, (16 << 10) + 1, 1_000_003]  # up to 64 KiB, just above, and many windows


def filled(ring: Communicator, count: int, value: float, in_ring: bool = False) -> Tensor:
    return Tensor.of(ring, np.arange(count) % 1000 + value, DType.FLOAT32, ring=in_ring)


@pytest.mark.parametrize("in_ring", [False, True], ids=["private", "ring memory"])
@pytest.mark.parametrize("launcher", ["threads", "processes"])
@on_ranks(3)
def test_around_the_ring(seat: Seat, launcher: str, in_ring: bool) -> None:
    """Every rank sends to the next one and receives from the one before, at once and one after another."""
    ring = seat.open()
    after, before = (ring.rank + 1) % 3, (ring.rank - 1) % 3
    for count in COUNTS:
        ours = filled(ring, count, ring.rank, in_ring)
        theirs = filled(ring, count, -1, in_ring)
        outgoing = send(ring, ours.buffer, after, blocking=False)
        incoming = receive(ring, theirs.buffer, before, blocking=False)
        incoming.wait()
        outgoing.wait()
        assert incoming.source() == before
        assert theirs.values.tolist() == filled(ring, count, before).values.tolist()
        if ring.rank == 0:
            send(ring, ours.buffer, after)
            receive(ring, theirs.buffer, before)
        else:
            receive(ring, theirs.buffer, before)
            send(ring, ours.buffer, after)


@on_ranks(3)
def test_tags_and_order(seat: Seat) -> None:
    """A tag picks a message; those of one tag come in order; any source takes what is there."""
    ring = seat.open()
    if ring.rank:
        for number in range(4):
            send(ring, filled(ring, 1, 10 * ring.rank + number).buffer, 0, tag=number % 2)
        return
    got = filled(ring, 1, -1)
    for source in (1, 2):
        for tag, number in ((1, 1), (0, 0), (1, 3)):
            receive(ring, got.buffer, source, tag=tag)
            assert got.values.tolist() == [10 * source + number]
    left = set()
    for _ in range(2):
        message = receive(ring, got.buffer, ANY)
        left.add((message.source(), float(got.values[0])))
    assert left == {(1, 12.0), (2, 22.0)}


@pytest.mark.parametrize("hosts", [(), (0, 1)])
@on_ranks(2)
def test_many_small_ones_before_anyone_receives(seat: Seat, hosts: tuple[int, ...]) -> None:
    """In order, beside a collective; more than are buffered: later sends end when they are received."""
    ring = seat.open()
    sent = [send(ring, filled(ring, 5, n).buffer, 1, blocking=False) for n in range(1500)] if ring.rank == 0 else []
    ring.barrier()
    got = filled(ring, 5, -1)
    for number in range(1500 if ring.rank == 1 else 0):
        receive(ring, got.buffer, 0)
        assert got.values[0] == number
    for message in sent:
        message.wait()


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
@on_ranks(2)
def test_who_leaves_after_the_last_one_has_left_nobody_in_the_lurch(seat: Seat, hosts: tuple[int, ...]) -> None:
    """The sender learns that they were received, and not that their receiver has gone."""
    for number in range(1, 100):
        ring = seat.open(number)
        tensor = filled(ring, 20_000, 1).buffer
        if ring.rank == 0:
            for message in [send(ring, tensor, 1, blocking=False) for _ in range(40)]:
                message.wait()
        else:
            for _ in range(40):
                receive(ring, tensor, 0)
        ring.close()
        seat.opened.clear()


@on_ranks(2)
def test_large_ones_beside_collectives(seat: Seat) -> None:
    """One that nobody waits for moves on while its rank is in a collective."""
    ring = seat.open()
    tensor = filled(ring, 1_000_003, ring.rank)
    if ring.rank == 0:
        message = send(ring, tensor.buffer, 1, blocking=False)
    else:
        receive(ring, tensor.buffer, 0)
    ring.barrier()
    if ring.rank == 0:
        message.wait()
    assert tensor.values[0] == 0


def send_until_it_fails(ring: Communicator) -> None:
    """The refusal of an earlier message is on its way."""
    for _ in range(1000):
        send(ring, filled(ring, 3, 0).buffer, 1, tag=8)
        time.sleep(0.005)


@pytest.mark.parametrize("hosts", [(), (0, 1)], ids=["one host", "two hosts"])
@pytest.mark.parametrize("count", [3, 100_000])
@on_ranks(2)
def test_other_sizes_and_types(seat: Seat, count: int, hosts: tuple[int, ...]) -> None:
    """Both sides raise, with both sizes, a small one's sender at a later call, and the group lives on."""
    ring = seat.open()
    other = Tensor.of(ring, np.zeros(count), DType.FLOAT64)
    for theirs in (filled(ring, count + 1, 0), other):
        if ring.rank == 1:
            with pytest.raises(CollectiveMismatch, match=rf"rank 1: receive from rank 0 .*got {count} elements"):
                receive(ring, theirs.buffer, 0)
        elif count > 3:
            expected = len(theirs.values)
            with pytest.raises(CollectiveMismatch, match=rf"rank 0: send to rank 1 .*: rank 1 expected {expected} "):
                send(ring, filled(ring, count, 0).buffer, 1)
        else:
            send(ring, filled(ring, count, 0).buffer, 1)
        ring.barrier()
        if ring.rank == 0 and count == 3:
            expected = rf"expected {len(theirs.values)} .*got 3 elements.*; send and"
            earlier = rf"rank 0: send to rank 1 \(tag \d\), an earlier one: {expected}"
            with pytest.raises(CollectiveMismatch, match=earlier):
                send_until_it_fails(ring)
    ring.barrier()
    if ring.rank == 0:
        send(ring, filled(ring, count, 5).buffer, 1, tag=9)
    else:
        got = filled(ring, count, 0)
        receive(ring, got.buffer, 0, tag=9)
        assert got.values[0] == 5


@pytest.mark.parametrize("blocking", [True, False], ids=["send or receive", "wait"])
@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("how", ["abort", "leave", "has left"])
@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 1)], ids=["one host", "two hosts"])
def test_the_other_rank_fails_or_leaves(hosts: tuple[int, ...], how: str, sends: bool, blocking: bool) -> None:
    """Also where others of its host stay: rank 2 waits for a rank that waits for rank 1."""

    def body(seat: Seat) -> None:
        ring = seat.open()
        seat.meet()
        tensor = filled(ring, 500_000, 0)
        if ring.rank == 1:
            assert how == "has left" or calls.wait(30)
            if how == "abort":
                ring.abort("rank 1 raised ValueError: boom")
            return
        calls.set()
        words = "boom" if how == "abort" else "left"
        to = 1 if ring.rank == 0 else 0
        with pytest.raises(CollectiveAborted, match=words):
            (send if sends else receive)(ring, tensor.buffer, to, blocking=blocking).wait()

    calls = threading.Event()
    as_threads(3, body, hosts=hosts)


@on_ranks(2)
def test_the_deadline_of_a_receive(seat: Seat) -> None:
    ring = seat.open()
    if ring.rank == 0:
        ring.limit_time(0.2)
        with pytest.raises((CollectiveTimeout, CollectiveAborted), match=r"receive from rank 1 \(tag 0\) timed out"):
            receive(ring, filled(ring, 5, 0).buffer, 1)
    else:
        while not ring.aborted:
            time.sleep(0.001)


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)], ids=["one host", "two hosts"])
def test_a_small_one_outlives_its_sender(hosts: tuple[int, int]) -> None:
    """What a rank has sent before it left can be received."""

    def body(seat: Seat) -> None:
        ring = seat.open()
        if ring.rank == 0:
            send(ring, filled(ring, 5, 3).buffer, 1)
            ring.close()
            gone.set()
        else:
            assert gone.wait(30)
            got = filled(ring, 5, 0)
            receive(ring, got.buffer, 0)
            assert got.values[0] == 3

    gone = threading.Event()
    as_threads(2, body, hosts=hosts)


@on_ranks(2)
def test_wrong_ranks_and_tags(seat: Seat) -> None:
    ring = seat.open()
    buffer = filled(ring, 1, 0).buffer
    with pytest.raises(ValueError, match="rank 2 is not in this group of 2"):
        send(ring, buffer, 2)
    with pytest.raises(ValueError, match="tag of a message"):
        receive(ring, buffer, 0, tag=-1)


@pytest.mark.parametrize("hosts", [(), (0, 1)], ids=["one host", "two hosts"])
@on_ranks(2)
def test_the_wait_for_the_other_side_is_counted(seat: Seat, hosts: tuple[int, ...]) -> None:
    """A receive waits until its message has come, a large send until it is taken."""
    ring = seat.open()
    for tensor in (filled(ring, 5, 0), filled(ring, 500_000, 0)):
        ring.barrier()
        _, before = ring.seconds_spent()
        if ring.rank == 1:
            time.sleep(0.5)
            send(ring, tensor.buffer, 0)
        else:
            receive(ring, tensor.buffer, 1)
            spent, waited = ring.seconds_spent()
            assert 0.1 < waited - before <= spent
    _, before = ring.seconds_spent()
    if ring.rank == 0:
        send(ring, filled(ring, 500_000, 0).buffer, 1)
        assert ring.seconds_spent()[1] - before > 0.1
    else:
        time.sleep(0.5)
        receive(ring, filled(ring, 500_000, 0).buffer, 0)


HOSTS = (0, 1, 0)


@pytest.mark.parametrize("in_ring", [False, True], ids=["private", "ring memory"])
@on_ranks(3, hosts=HOSTS)
def test_between_hosts(seat: Seat, in_ring: bool) -> None:
    """Every rank sends to every other one, whatever its host; streams of one pair come one after another."""
    ring = seat.open()
    others = [rank for rank in range(3) if rank != ring.rank]
    for count in COUNTS:
        ours = filled(ring, count, ring.rank, in_ring)
        theirs = {(rank, tag): filled(ring, count, -1, in_ring) for rank in others for tag in (0, 1)}
        sent = [send(ring, ours.buffer, rank, tag=tag, blocking=False) for rank in others for tag in (0, 1)]
        come = [receive(ring, theirs[rank, tag].buffer, rank, tag=tag, blocking=False) for rank, tag in theirs]
        for message in [*come, *sent]:
            message.wait()
        for (rank, _), tensor in theirs.items():
            assert tensor.values.tolist() == filled(ring, count, rank).values.tolist()
    if ring.rank == 0:
        got, sources = filled(ring, 5, -1), set()
        for _ in range(2):
            message = receive(ring, got.buffer, ANY, tag=3)
            assert got.values[0] == message.source()
            sources.add(message.source())
        assert sources == {1, 2}
    else:
        send(ring, filled(ring, 5, ring.rank).buffer, 0, tag=3)
