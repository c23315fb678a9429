"""Broadcast, allgather, alltoall and reducescatter: every element type, uneven parts, every path."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from native.collectives.matrix import every_type_and_size
from native.over_devices import also_on_devices
from native.ranks import LAUNCHERS, Seat
from native.values import Array, Tensor, decode, encode, produced, reduced_samples, sample
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.partition import row_split
from ring_notebook.core.work import Work

SEGMENT = 512 << 10  # native kSegmentBytesCrowded
MEMORIES: dict[str, Callable[[int], bool]] = {
    "ring": lambda rank: True,
    "ordinary": lambda rank: False,
    "mixed": lambda rank: rank % 2 == 0,
}
pytestmark = [every_type_and_size, also_on_devices]


def rows_of(dtype: DType, rank: int, rows: int, width: int) -> Array:
    """A matrix of ``rows`` times ``width`` that differs by rank."""
    return sample(dtype, rank, rows * width).reshape(rows, width)


def received(work: Work, dtype: DType) -> Array:
    """The flat values that an allgather or alltoall produced."""
    storage: npt.NDArray[np.generic] = encode(np.zeros(0), dtype)
    output = produced(work)
    return decode(np.frombuffer(output, storage.dtype), dtype) if len(output) else np.zeros(0)


def long(dtype: DType) -> int:
    """Rows of 3 elements that fill one segment and a bit: several, where a segment holds a part for each rank."""
    return SEGMENT // dtype.itemsize // 3 + 5


def test_broadcast(launcher: str, size: int, dtype: DType) -> None:
    """From the first and the last rank, in place and not, inline, from ring memory and staged."""
    for rank in range(size):
        sample(dtype, rank, long(dtype) * 3)

    def body(seat: Seat) -> None:
        ring = seat.open()
        for memory, placed in MEMORIES.items():
            for root in {0, size - 1}:
                for shape in ((), (0, 3), (7, 3), (long(dtype), 3)):
                    count = int(np.prod(shape))
                    values = [sample(dtype, rank, count).reshape(shape) for rank in range(size)]
                    at = placed(ring.rank)
                    source = Tensor.of(ring, values[ring.rank], dtype, ring=at)
                    target = source if memory == "mixed" else Tensor.of(ring, np.zeros(shape), dtype, ring=at)
                    ring.broadcast(source.buffer, target.buffer, root)
                    np.testing.assert_array_equal(target.values, values[root])
                    if target is not source:
                        np.testing.assert_array_equal(source.values, values[ring.rank])

    LAUNCHERS[launcher](size, body)


def gathers(size: int, dtype: DType) -> list[Sequence[int]]:
    """Rows by rank: even, rising from none, one rank alone, one rank with more than its inline slot holds."""
    lone = [0] * size
    lone[-1] = 5
    return [[2] * size, list(range(size)), lone, [long(dtype) if rank == 0 else rank for rank in range(size)]]


def test_allgather(launcher: str, size: int, dtype: DType) -> None:
    """The first dimension may differ by rank, and be zero."""
    for rank in range(size):
        for rows in gathers(size, dtype):
            rows_of(dtype, rank, rows[rank], 3)

    def body(seat: Seat) -> None:
        ring = seat.open()
        for placed in MEMORIES.values():
            for rows in gathers(size, dtype):
                source = Tensor.of(ring, rows_of(dtype, ring.rank, rows[ring.rank], 3), dtype, ring=placed(ring.rank))
                work = ring.allgather(source.buffer)
                everything = [rows_of(dtype, rank, rows[rank], 3).ravel() for rank in range(size)]
                np.testing.assert_array_equal(received(work, dtype), np.concatenate(everything))
                assert work.counts() == [3 * count for count in rows]

    LAUNCHERS[launcher](size, body)


def exchanges(size: int, dtype: DType) -> list[list[list[int]]]:
    """Splits by sending rank: even, uneven with zeros, everything to one rank, large."""
    even = [[2] * size] * size
    uneven = [[(source * 2 + target) % 4 for target in range(size)] for source in range(size)]
    funnel = [[source + 1 if target == size - 1 else 0 for target in range(size)] for source in range(size)]
    large = [[long(dtype) // size + target for target in range(size)] for _ in range(size)]
    return [even, uneven, funnel, large]


def test_alltoall(launcher: str, size: int, dtype: DType) -> None:
    """Rank r gets the r-th part of everybody's rows, in rank order."""

    for rank in range(size):
        for splits in exchanges(size, dtype):
            rows_of(dtype, rank, sum(splits[rank]), 3)

    def part(values: Array, splits: Sequence[int], target: int) -> Array:
        return values[sum(splits[:target]) : sum(splits[: target + 1])]

    def body(seat: Seat) -> None:
        ring = seat.open()
        for placed in MEMORIES.values():
            for splits in exchanges(size, dtype):
                values = [rows_of(dtype, rank, sum(splits[rank]), 3) for rank in range(size)]
                source = Tensor.of(ring, values[ring.rank], dtype, ring=placed(ring.rank))
                work = ring.alltoall([source.buffer], splits[ring.rank])
                parts = [part(values[rank], splits[rank], ring.rank).ravel() for rank in range(size)]
                np.testing.assert_array_equal(received(work, dtype), np.concatenate(parts))
                assert work.counts() == [len(piece) for piece in parts]

    LAUNCHERS[launcher](size, body)


def scatter(ring: Communicator, dtype: DType, rows: int, op: ReduceOp, *, ring_memory: bool, in_place: bool) -> None:
    """One reducescatter of ``rows`` rows; in place means into this rank's own rows."""
    values = sample(dtype, ring.rank, rows * 3, op).reshape(rows, 3)
    split = row_split(rows, ring.size)
    first = sum(split[: ring.rank])
    own = slice(first, first + split[ring.rank])
    source = Tensor.of(ring, values, dtype, ring=ring_memory)
    target = Tensor.of(ring, values[own] * 0, dtype, ring=ring_memory)
    if in_place:
        target.array = source.array[own]
        target.buffer.address = source.array.ctypes.data + first * 3 * dtype.itemsize
    ring.reducescatter(source.buffer, target.buffer, op=op, postscale=2.0)
    reference = reduced_samples(dtype, ring.size, rows * 3, op, 1.0, 2.0).reshape(rows, 3)
    np.testing.assert_array_equal(target.values, reference[own])
    if not in_place:
        np.testing.assert_array_equal(source.values, values)


def test_reducescatter(launcher: str, size: int, dtype: DType) -> None:
    """The first ranks get one row more where rows do not divide; fewer rows than ranks leave some with none."""
    reduced_samples(dtype, size, long(dtype) * 3, ReduceOp.SUM, 1.0, 2.0)

    def body(seat: Seat) -> None:
        ring = seat.open()
        for placed in MEMORIES.values():
            at = placed(ring.rank)
            for rows in (0, 1, size + 1, 5 * size, long(dtype)):
                scatter(ring, dtype, rows, ReduceOp.SUM, ring_memory=at, in_place=rows % 2 == 0)
            scatter(ring, dtype, 3 * size + 2, ReduceOp.MAX, ring_memory=at, in_place=False)
            scatter(ring, dtype, 3 * size + 2, ReduceOp.PRODUCT, ring_memory=at, in_place=True)

    LAUNCHERS[launcher](size, body)
