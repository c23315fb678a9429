"""float32 that is rounded to two bytes between hosts, and only there."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from native.ranks import Seat, as_threads, on_ranks
from native.values import Tensor, decode, encode
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.errors import CollectiveMismatch

HOSTS = [(0, 1), (0, 0, 1), (0, 1, 0, 1), (0, 1, 2), (0, 1, 2, 3, 0)]
# More than travels with the headers, and over several segments of several pieces with odd ends.
COUNTS = (20_001, 700_003)
WIRES = {"float16": DType.FLOAT16, "bfloat16": DType.BFLOAT16}
STEP = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half the distance between neighbours, relative: what one rounding may add."""


@lru_cache  # all ranks want those of every rank
def noise(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng([rank, count]).uniform(1, 2, count).astype(np.float32)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("memory", ["ring", "ordinary"])
def test_sums_are_rounded_once_per_hop(hosts: tuple[int, ...], wire: str, memory: str) -> None:
    sums = {
        count: np.sum([noise(rank, count) / 2 for rank in range(len(hosts))], axis=0, dtype=np.float64)
        for count in COUNTS
    }

    def body(seat: Seat) -> list[bytes]:
        ring = seat.open(wire=wire)
        said = []
        for count in COUNTS:
            for op in (ReduceOp.SUM, ReduceOp.AVERAGE):
                tensor = Tensor.of(ring, noise(ring.rank, count), DType.FLOAT32, ring=memory == "ring")
                ring.allreduce([tensor.buffer], [tensor.buffer], op=op, prescale=0.5)
                exact = sums[count] / (ring.size if op is ReduceOp.AVERAGE else 1)
                # Partial sums are no larger than the sum, and each of the hosts rounds once.
                np.testing.assert_allclose(tensor.values, exact, rtol=STEP[wire] * len(set(hosts)))
                rounded = decode(encode(tensor.values, WIRES[wire]), WIRES[wire])
                np.testing.assert_array_equal(tensor.values, rounded)
                said.append(tensor.array.tobytes())
        return said

    results = as_threads(len(hosts), body, hosts=hosts)
    assert all(result == results[0] for result in results), "ranks ended with different bits"


@pytest.mark.parametrize("hosts", HOSTS)
def test_an_average_stays_in_the_range_of_the_wire(hosts: tuple[int, ...]) -> None:
    """float16 ends at 65504, and no sum of two of these is sent."""

    def body(seat: Seat) -> None:
        ring = seat.open(wire="float16")
        for op, factor in ((ReduceOp.AVERAGE, 1.0), (ReduceOp.SUM, 1 / ring.size)):
            tensor = Tensor.of(ring, np.full(COUNTS[0], 40000.0), DType.FLOAT32)
            ring.allreduce([tensor.buffer], [tensor.buffer], op=op, postscale=factor)
            np.testing.assert_allclose(tensor.values, 40000.0, rtol=STEP["float16"] * len(set(hosts)))

    as_threads(len(hosts), body, hosts=hosts)


@pytest.mark.parametrize("wire", WIRES)
def test_only_large_float32_sums_are_rounded(wire: str) -> None:
    """Other types, small tensors, other reductions and what is only moved stay as they are, as all within a host."""

    def body(seat: Seat) -> None:
        ring = seat.open(wire=wire)
        for dtype, count in ((DType.FLOAT64, 100_000), (DType.INT32, 100_000), (DType.FLOAT32, 1000)):
            values = np.arange(count) % 4001 + 2049.0  # neither format holds all of these
            tensor = Tensor.of(ring, values, dtype)
            ring.allreduce([tensor.buffer], [tensor.buffer])
            np.testing.assert_array_equal(tensor.values, values * ring.size)
        tensor = Tensor.of(ring, noise(ring.rank, 100_000), DType.FLOAT32)
        ring.allreduce([tensor.buffer], [tensor.buffer], op=ReduceOp.MAX)
        np.testing.assert_array_equal(tensor.array, np.max([noise(rank, 100_000) for rank in range(ring.size)], 0))
        tensor = Tensor.of(ring, noise(0, 100_000), DType.FLOAT32)
        ring.broadcast(tensor.buffer, tensor.buffer, 0)
        np.testing.assert_array_equal(tensor.array, noise(0, 100_000))

    def one_host(seat: Seat) -> None:
        ring = seat.open(wire=wire)
        tensor = Tensor.of(ring, noise(0, 100_000), DType.FLOAT32)
        ring.allreduce([tensor.buffer], [tensor.buffer])
        np.testing.assert_array_equal(tensor.array, noise(0, 100_000) * 2)

    as_threads(4, body, hosts=(0, 1, 1, 2))
    as_threads(2, one_host)


@on_ranks(2, hosts=(0, 1))
def test_hosts_must_round_alike(seat: Seat) -> None:
    ring = seat.open(wire="float16" if seat.rank == 1 else "")
    tensor = Tensor.of(ring, np.ones(100_000), DType.FLOAT32)
    with pytest.raises(CollectiveMismatch, match="set RING_WIRE to the same value on every rank"):
        ring.allreduce([tensor.buffer], [tensor.buffer])
    ring.barrier()


@on_ranks(3, hosts=(0, 0, 1))
def test_a_joined_rank_adds_nothing(seat: Seat) -> None:
    ring = seat.open(wire="bfloat16")
    if ring.rank == 2:
        ring.join()
        return
    tensor = Tensor.of(ring, np.full(100_000, 3.0), DType.FLOAT32)
    ring.allreduce([tensor.buffer], [tensor.buffer])
    np.testing.assert_array_equal(tensor.values, 6.0)
    ring.join()


@on_ranks(2, hosts=(0, 1))
def test_more_than_a_message_can_hold(seat: Seat) -> None:
    """Small payloads travel in one message, whose size has a limit: said when the generation begins, on every rank."""
    with pytest.raises(ValueError, match=r"would take 64 MiB, and at most 64 are possible: lower RING_INLINE"):
        seat.open(inline_bytes=64 << 20)
