"""Plans between hosts as tables, and operations of so many hosts that each leader no longer sends to each."""

from __future__ import annotations

import re

import numpy as np
import pytest

from native.ranks import Seat, as_threads, on_ranks
from native.values import Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.core.native import core
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch

HOSTS = 13
"""The fewest that pass headers on, and no power of two."""
PLACES = tuple((rank * 5) % HOSTS for rank in range(HOSTS + 4))
"""Seventeen ranks, of which some share a host and none is in a row with its neighbour."""


def test_leaders_of_few_hosts_send_to_each() -> None:
    assert [core.agree_directly(hosts) for hosts in (2, 3, HOSTS - 1, HOSTS, 4096)] == [True, True, True, False, False]


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 5, 7, 8, 13, 64, 100])
def test_every_block_reaches_every_host_once(hosts: int) -> None:
    plans = [core.dissemination_plan(hosts, host) for host in range(hosts)]
    held = [[host] for host in range(hosts)]
    for number in range((hosts - 1).bit_length()):
        sent = {}
        for host, plan in enumerate(plans):
            to, _, blocks = plan[number]
            sent[host, to] = held[host][:blocks]
        for host, plan in enumerate(plans):
            _, source, _ = plan[number]
            held[host] += sent.pop((source, host))
        assert not sent, "a message that no host takes"
    for host, blocks in enumerate(held):
        assert blocks == [(host + i) % hosts for i in range(hosts)]


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 5, 7, 8, 13, 64, 100])
def test_every_host_gets_one_sum_added_in_one_order(hosts: int) -> None:
    """Sums are sorted tuples of brackets, which are equal where the same numbers are added in the same order."""
    plans = [list(core.doubling_plan(hosts, host)) for host in range(hosts)]
    assert max(map(len, plans)) <= hosts.bit_length() + 1
    sums: list[object] = list(range(hosts))
    answers = {"give": "take", "give result": "take result", "both": "both"}
    answers |= {answer: kind for kind, answer in answers.items()}
    while any(plans):
        ready = {
            (host, plan[0][1])
            for host, plan in enumerate(plans)
            if plan and plans[plan[0][1]] and plans[plan[0][1]][0] == (answers[plan[0][0]], host)
        }
        assert ready, "hosts wait for each other"
        before = list(sums)
        for host, peer in ready:
            kind = plans[host].pop(0)[0]
            if kind in ("both", "take"):
                sums[host] = (before[min(host, peer)], before[max(host, peer)])
            elif kind == "take result":
                sums[host] = before[peer]
    assert all(one == sums[0] for one in sums)
    assert re.findall(r"\d+", str(sums[0])) == [str(host) for host in range(hosts)]


def test_operations_of_thirteen_hosts() -> None:
    """Every operation, with and without payloads in the headers, some by names."""
    size = len(PLACES)
    numbers = np.random.default_rng(0).standard_normal((size, 300_001))
    means = numbers.mean(axis=0)

    def body(seat: Seat) -> None:
        ring = seat.open(inline_bytes=4096)
        for count in (1, 1000, 5000, 70_001, 300_001):
            tensor = Tensor.of(ring, numbers[seat.rank, :count], DType.FLOAT32)
            ring.allreduce([tensor.buffer], [tensor.buffer], op=ReduceOp.AVERAGE)
            np.testing.assert_allclose(tensor.values, means[:count], atol=1e-6)
            same = ring.allgather(Tensor.of(ring, tensor.values[:64], DType.FLOAT32).buffer)
            bits = np.frombuffer(same.output(), np.uint32).reshape(size, -1)
            assert (bits == bits[0]).all(), "ranks got different bits"
            tensor = Tensor.of(ring, np.full(count, seat.rank), DType.INT64)
            ring.allreduce([tensor.buffer], [tensor.buffer], op=ReduceOp.MAX)
            assert (tensor.values == size - 1).all()
            ring.broadcast(tensor.buffer, tensor.buffer, size - 1)
        for count in (1, 1000):
            parts = Tensor.of(ring, np.full(count * size, seat.rank), DType.INT32)
            got = ring.alltoall([parts.buffer], [count] * size)
            assert (np.frombuffer(got.output(), np.int32).reshape(size, count) == np.arange(size)[:, None]).all()
        few = ring.allgather(Tensor.of(ring, np.full(seat.rank, seat.rank), DType.INT32).buffer)
        assert few.counts() == list(range(size))
        ring.commit()
        handles = []
        for number in np.random.default_rng(seat.rank).permutation(6):
            tensor = Tensor.of(ring, np.full(9, number), DType.INT32)
            work = ring.allreduce([tensor.buffer], [tensor.buffer], name=f"gradient {number}", blocking=False)
            handles.append((number, tensor, work))
        for number, tensor, work in handles:
            work.wait()
            assert set(tensor.values.tolist()) == {number * size}

    as_threads(size, body, hosts=PLACES, arena=2 << 30)


def test_all_of_thirteen_hosts_get_the_table_of_a_mismatch() -> None:
    def body(seat: Seat) -> str:
        ring = seat.open()
        tensor = Tensor.of(ring, np.ones(4 if seat.rank == 7 else 3), DType.FLOAT32)
        with pytest.raises(CollectiveMismatch) as caught:
            ring.allreduce([tensor.buffer], [tensor.buffer], name="w")
        own = Tensor.of(ring, np.ones(3), DType.FLOAT32)
        ring.allreduce([own.buffer], [own.buffer])
        assert set(own.values.tolist()) == {float(HOSTS)}
        return str(caught.value).partition("The calls at sequence")[2]

    tables = as_threads(HOSTS, body, hosts=tuple(range(HOSTS)))
    assert len(set(tables)) == 1
    assert "rank 7: allreduce" in tables[0]
    assert "[4]" in tables[0]


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 30_000, 1_000_000], ids=["eager", "doubling", "ring"])
@on_ranks(HOSTS, hosts=tuple(range(HOSTS)))
def test_an_abort_reaches_all_of_thirteen_hosts(seat: Seat, count: int) -> None:
    """One rank does not come; all others end with its reason, and form a new generation."""
    ring = seat.open()
    tensor = Tensor.of(ring, np.ones(count), DType.FLOAT32)
    ring.allreduce([tensor.buffer], [tensor.buffer])
    seat.meet()
    if seat.rank == 4:
        ring.abort("the data ran out")
    else:
        with pytest.raises(CollectiveAborted, match="the data ran out"):
            ring.allreduce([tensor.buffer], [tensor.buffer])
    ring.close()
    seat.opened.clear()
    ring = seat.open(2)
    tensor = Tensor.of(ring, np.ones(count), DType.FLOAT32)
    ring.allreduce([tensor.buffer], [tensor.buffer])
    assert set(tensor.values.tolist()) == {float(HOSTS)}
