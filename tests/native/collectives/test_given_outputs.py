"""allgather and alltoall into outputs that the caller gives: in place, of several inputs, and where they do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from native.ranks import Seat, on_ranks
from native.values import Tensor
from ring_notebook.core.buffers import Buffer, DType

COUNTS = [1, 5000, 300_003]  # in the mailbox, and over one or several segments
memory = pytest.mark.parametrize("in_ring", [False, True], ids=["private", "ring memory"])
launchers = pytest.mark.parametrize("launcher", ["threads", "hosts"])


def cut(tensor: Tensor, counts: list[int]) -> list[Buffer]:
    """Consecutive parts of ``tensor``, as Buffers."""
    starts = np.cumsum([0, *counts])
    return [
        Buffer(tensor.buffer.address + 4 * int(start), (count,), DType.FLOAT32, tensor)
        for start, count in zip(starts, counts, strict=False)
    ]


def made(ring: object, count: int, value: float, in_ring: bool) -> Tensor:
    return Tensor.of(ring, np.arange(count) % 997 + value, DType.FLOAT32, ring=in_ring)  # type: ignore[arg-type]


def expected(count: int, value: float) -> np.ndarray:
    return np.arange(count) % 997 + value


def equal(tensor: Tensor, *parts: np.ndarray) -> bool:
    return np.array_equal(tensor.values, np.concatenate(parts))


@memory
@launchers
@on_ranks(3)
def test_allgather(seat: Seat, launcher: str, in_ring: bool) -> None:
    """Uneven parts go where they are asked for; a rank's own part may lie in its place already."""
    ring = seat.open()
    for count in COUNTS:
        counts = [count + rank for rank in range(3)]
        whole = [expected(counts[rank], rank) for rank in range(3)]
        target = made(ring, sum(counts), -1, in_ring)
        places = cut(target, counts)
        work = ring.allgather(made(ring, counts[ring.rank], ring.rank, in_ring).buffer, places)
        assert work.placed()
        assert work.counts() == counts
        assert equal(target, *whole)

        again = made(ring, sum(counts), -1, in_ring)
        start = sum(counts[: ring.rank])
        again.array[start : start + counts[ring.rank]] = expected(counts[ring.rank], ring.rank)
        places = cut(again, counts)
        assert ring.allgather(places[ring.rank], places, blocking=False).wait() is None
        assert equal(again, *whole)


@memory
@launchers
@on_ranks(3)
def test_alltoall(seat: Seat, launcher: str, in_ring: bool) -> None:
    """What each rank sends lies in a tensor for each receiver, what it gets in one for each sender."""
    ring = seat.open()
    for count in COUNTS:
        inputs = [made(ring, count + rank, 10 * ring.rank + rank, in_ring) for rank in range(3)]
        outputs = [made(ring, count + ring.rank, -1, in_ring) for _ in range(3)]
        work = ring.alltoall(
            [tensor.buffer for tensor in inputs],
            [count + rank for rank in range(3)],
            [tensor.buffer for tensor in outputs],
        )
        assert work.placed()
        for rank, tensor in enumerate(outputs):
            assert equal(tensor, expected(count + ring.rank, 10 * rank + ring.rank))


@launchers
@on_ranks(3)
def test_outputs_that_do_not_fit(seat: Seat, launcher: str) -> None:
    """Of another size, or in the memory that others read: the result has memory of its own, and all is as without."""
    ring = seat.open()
    for count in COUNTS:
        own = made(ring, 3 * count, ring.rank, True)
        work = ring.alltoall([own.buffer], [count] * 3, cut(own, [count] * 3))
        assert not work.placed()
        rows = slice(ring.rank * count, (ring.rank + 1) * count)
        parts = np.concatenate([expected(3 * count, rank)[rows] for rank in range(3)])
        assert np.array_equal(np.frombuffer(work.output(), np.float32), parts)
        assert equal(own, expected(3 * count, ring.rank))
        wrong = made(ring, 3 * count + 3, -1, False)
        work = ring.allgather(own.buffer, cut(wrong, [count + 1] * 3))
        assert not work.placed()
        assert work.counts() == [3 * count] * 3
        assert equal(wrong, expected(3 * count + 3, -1))
