"""Values at the edge of what a type holds: NaNs, sums beyond it, integers scaled out of it."""

from __future__ import annotations

import numpy as np
import pytest

from native.ranks import Seat, as_threads, on_ranks
from native.values import Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import ReduceOp

FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)
HOSTS = [(), (0, 0, 1), (0, 1, 0, 1)]
# In the mailbox, with odd ends; and more than any takes.
COUNTS = (37, 40_003)
FINEST = {DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8}


def size_of(hosts: tuple[int, ...]) -> int:
    """Ranks of a test over these hosts; three on one."""
    return len(hosts) or 3


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_nan_is_seen_wherever_it_is(dtype: DType, hosts: tuple[int, ...]) -> None:
    """In minima and maxima, as in torch.minimum: whichever rank has it, every rank gets it."""
    size = size_of(hosts)

    def body(seat: Seat) -> None:
        ring = seat.open()
        for count in COUNTS:
            for op in (ReduceOp.MIN, ReduceOp.MAX):
                for memory in (False, True):
                    values = np.full(count, 1.0 + ring.rank)
                    values[ring.rank :: size + 1] = np.nan  # every size + 1st is no rank's
                    tensor = Tensor.of(ring, values, dtype, ring=memory)
                    ring.allreduce([tensor.buffer], [tensor.buffer], op=op)
                    reference = np.full(count, np.nan)
                    reference[size :: size + 1] = 1.0 if op is ReduceOp.MIN else size
                    np.testing.assert_array_equal(tensor.values, reference)

    as_threads(size, body, hosts=hosts)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("dtype", FINEST)
def test_an_average_stays_in_range(dtype: DType, hosts: tuple[int, ...]) -> None:
    """float16 ends at 65504: the sum of two is beyond it, the average, or a sum that a factor shrinks, is not."""
    size = size_of(hosts)

    def body(seat: Seat) -> None:
        ring = seat.open()
        for count in COUNTS:
            for op, factor in ((ReduceOp.AVERAGE, 1.0), (ReduceOp.AVERAGE, 0.5), (ReduceOp.SUM, 1 / size)):
                tensor = Tensor.of(ring, np.full(count, 40000.0), dtype)
                ring.allreduce([tensor.buffer], [tensor.buffer], op=op, postscale=factor)
                wanted = 40000.0 * (factor if op is ReduceOp.AVERAGE else 1.0)
                np.testing.assert_allclose(tensor.values, wanted, rtol=4 * FINEST[dtype])
            # Each factor once, before and after, and what makes a sum larger only when it is complete.
            tensor = Tensor.of(ring, np.full(count, 3.0 - 6.0 * (ring.rank % 2)), dtype)
            ring.allreduce([tensor.buffer], [tensor.buffer], prescale=2.0, postscale=10_000.0)
            np.testing.assert_allclose(tensor.values, 60_000.0 * (size % 2), rtol=4 * FINEST[dtype])

    as_threads(size, body, hosts=hosts)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("rows", [3, 9001])
def test_rows_of_an_average_stay_in_range(rows: int, hosts: tuple[int, ...]) -> None:
    def body(seat: Seat) -> None:
        ring = seat.open()
        source = Tensor.of(ring, np.full((rows, 5), 40000.0), DType.FLOAT16)
        own = rows // ring.size + (ring.rank < rows % ring.size)
        target = Tensor.of(ring, np.zeros((own, 5)), DType.FLOAT16)
        ring.reducescatter(source.buffer, target.buffer, op=ReduceOp.AVERAGE)
        np.testing.assert_allclose(target.values, 40000.0, rtol=2.0**-9)

    as_threads(size_of(hosts), body, hosts=hosts)


@pytest.mark.parametrize("count", COUNTS)
@on_ranks(4, hosts=(0, 1, 0, 1))
def test_an_average_counts_those_who_have_joined(seat: Seat, count: int) -> None:
    """Also where a whole host has."""
    ring = seat.open()
    if ring.rank != 0:
        ring.join()
        return
    tensor = Tensor.of(ring, np.full(count, 40000.0), DType.FLOAT16)
    ring.allreduce([tensor.buffer], [tensor.buffer], op=ReduceOp.AVERAGE)
    np.testing.assert_array_equal(tensor.values, 10000.0)
    ring.join()


@pytest.mark.parametrize(
    "dtype", [DType.UINT8, DType.INT8, DType.INT16, DType.INT32, DType.INT64, DType.UINT16, DType.UINT32]
)
@on_ranks(1)
def test_integers_saturate_where_a_factor_takes_them_out_of_range(seat: Seat, dtype: DType) -> None:
    """At both ends; what is just inside truncates, and what is not a number is zero."""
    ring = seat.open()

    def scaled(value: int, factor: float) -> int:
        tensor = Tensor.of(ring, np.full(37, value), dtype)
        ring.allreduce([tensor.buffer], [tensor.buffer], prescale=factor)
        assert len(set(tensor.values.tolist())) == 1
        return int(tensor.values[0])

    limits = np.iinfo(tensor_type(dtype))
    assert scaled(100, 1e30) == limits.max
    assert scaled(100, float("inf")) == limits.max
    assert scaled(100, -1e30) == limits.min
    assert scaled(0, float("inf")) == 0  # 0 * inf
    assert scaled(100, 0.999) == 99
    if dtype is DType.INT8:
        assert [scaled(1, factor) for factor in (127.9, 128.0, -128.9, -129.0)] == [127, 127, -128, -128]


def tensor_type(dtype: DType) -> str:
    """NumPy's name of an integer type."""
    return dtype.name.lower()
