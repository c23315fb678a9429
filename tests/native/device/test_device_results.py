"""Every collective of tensors on devices gives what it gives in host memory, in the order of the caller's stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from harness.waiting import until
from native.fakes.device import FakeDevice, connections, devices, knobs
from native.ranks import LAUNCHERS, Seat, as_processes, on_ranks
from native.values import Tensor, decode, expected, reduced_samples, sample
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.partition import row_split
from ring_notebook.errors import CollectiveAborted

COUNT = 700
REDUCTIONS = (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    """What a stream does is late, so that who does not wait for it sees something else."""
    with knobs(cuda_delay_us=300):
        yield


def opened(seat: Seat, **settings: Any) -> tuple[Communicator, FakeDevice]:
    return seat.open(devices=devices(**settings)), FakeDevice(seat.rank)


def close_to(got: Any, wanted: Any, dtype: DType) -> bool:
    tolerance = {DType.FLOAT16: 2e-3, DType.BFLOAT16: 2e-2, DType.FLOAT32: 1e-6, DType.FLOAT64: 1e-14}.get(dtype, 0.0)
    return bool(np.allclose(got.astype(float), wanted.astype(float), rtol=tolerance, atol=0))


def reductions(seat: Seat) -> None:
    ring, device = opened(seat)
    for dtype in DType:
        for op in REDUCTIONS:
            for pre, post in ((1.0, 1.0), (2.0, 0.5), (0.5, 0.3)):
                tensor = device.tensor(sample(dtype, seat.rank, COUNT, op), dtype)
                ring.allreduce([tensor.buffer], [tensor.buffer], op=op, prescale=pre, postscale=post)
                wanted = reduced_samples(dtype, seat.size, COUNT, op, pre, post)
                assert close_to(device.read(tensor), wanted, dtype), (dtype, op, pre, post)
    assert ring.device_transport() == (("nccl", "") if seat.size > 1 else ("", ""))


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("size", [pytest.param(1), pytest.param(2, marks=pytest.mark.slow), pytest.param(3)])
def test_reductions(launcher: str, size: int) -> None:
    LAUNCHERS[launcher](size, reductions)


def movement(seat: Seat) -> None:
    ring, device = opened(seat)
    for dtype in DType:
        for root in range(seat.size):
            into = device.tensor(np.zeros(COUNT), dtype)
            ring.broadcast(device.tensor(sample(dtype, seat.rank, COUNT), dtype).buffer, into.buffer, root)
            assert np.array_equal(device.read(into), sample(dtype, root, COUNT))
        for step in (0, 3):  # even and not
            counts = [COUNT + step * rank for rank in range(seat.size)]
            own = device.tensor(sample(dtype, seat.rank, counts[seat.rank]), dtype)
            work = ring.allgather(own.buffer)
            wanted = np.concatenate([sample(dtype, rank, count) for rank, count in enumerate(counts)])
            assert np.array_equal(output(work, device, own), wanted)
            assert work.counts() == counts
        splits = [[3 * source + to for to in range(seat.size)] for source in range(seat.size)]
        own = device.tensor(sample(dtype, seat.rank, sum(splits[seat.rank])), dtype)
        work = ring.alltoall([own.buffer], splits[seat.rank])
        parts = []
        for source, row in enumerate(splits):
            begin = sum(row[: seat.rank])
            parts.append(sample(dtype, source, sum(row))[begin : begin + row[seat.rank]])
        assert np.array_equal(output(work, device, own), np.concatenate(parts))
        assert work.counts() == [row[seat.rank] for row in splits]


def output(work: Any, device: FakeDevice, like: Tensor) -> Any:
    result = work.device_output()
    raw = device.bytes_at(result.address, result.nbytes)
    return decode(np.frombuffer(raw, like.array.dtype), like.buffer.dtype)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_movement(launcher: str, size: int) -> None:
    LAUNCHERS[launcher](size, movement)


def scattered(seat: Seat) -> None:
    ring, device = opened(seat)
    for dtype in (DType.FLOAT32, DType.INT16, DType.BFLOAT16):
        for rows in (2 * seat.size, 2 * seat.size + 1, 1):
            inputs = [sample(dtype, rank, rows * 5).reshape(rows, 5) for rank in range(seat.size)]
            split = row_split(rows, seat.size)
            begin, end = sum(split[: seat.rank]), sum(split[: seat.rank + 1])
            into = device.tensor(np.zeros((end - begin, 5)), dtype)
            ring.reducescatter(device.tensor(inputs[seat.rank], dtype).buffer, into.buffer)
            assert np.array_equal(device.read(into), expected(inputs, dtype, ReduceOp.SUM)[begin:end])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_reducescatter(launcher: str) -> None:
    LAUNCHERS[launcher](3, scattered)


@on_ranks(2, gives=[[1.0, 1.0]] * 2)
def test_adasum_goes_through_host_memory(seat: Seat) -> list[float]:
    ring, device = opened(seat)
    own = np.array([1.0, 0.0]) if seat.rank == 0 else np.array([0.0, 1.0])
    tensor = device.tensor(own, DType.FLOAT32)
    ring.allreduce([tensor.buffer], [tensor.buffer], op=ReduceOp.ADASUM)
    return [float(value) for value in device.read(tensor)]


@on_ranks(2)
def test_a_group_of_tensors_and_names(seat: Seat) -> None:
    ring, device = opened(seat)
    tensors = [device.tensor(np.full(count, seat.rank + 1.0), DType.FLOAT32) for count in (1, 0, 70_000, 3)]
    buffers = [tensor.buffer for tensor in tensors]
    ring.allreduce(buffers, buffers)
    for tensor in tensors:
        assert np.all(device.read(tensor) == 3)
    order = range(20) if seat.rank == 0 else range(19, -1, -1)
    named = {i: device.tensor(np.full(50, i * (seat.rank + 1.0)), DType.FLOAT32) for i in order}
    works = {i: ring.allreduce([t.buffer], [t.buffer], name=f"g{i}", blocking=False) for i, t in named.items()}
    for i, work in works.items():
        work.wait()
        assert np.all(device.read(named[i]) == 3 * i)
    again = ring.allreduce([named[3].buffer], [named[3].buffer], name="g3", blocking=False)
    again.wait()  # the name is free as soon as its operation has been launched
    assert np.all(device.read(named[3]) == 18)


@on_ranks(3, gives=[0, 0, 0])
def test_a_joined_rank_adds_nothing(seat: Seat) -> int:
    ring, device = opened(seat)
    tensor = device.tensor(np.ones(5), DType.FLOAT32)
    ring.allreduce([tensor.buffer], [tensor.buffer])
    for _ in range(2 - seat.rank):
        for dtype in (DType.FLOAT32, DType.INT16):  # by NCCL, and through host memory
            tensor = device.tensor(np.ones(5), dtype)
            ring.allreduce([tensor.buffer], [tensor.buffer])
            assert np.all(device.read(tensor) >= 1)
    return ring.join().last_rank()


@on_ranks(3, gives=[[11.0, 101.0, 111.0], [11.0, 110.0, 111.0], [110.0, 101.0, 111.0]])
def test_process_sets(seat: Seat) -> list[float]:
    ring, device = opened(seat)
    sums = []
    for members in ([0, 1], [1, 2], [0, 2], [0, 1, 2]):
        group = ring.group(members)
        if group is None:
            continue
        tensor = device.tensor(np.full(9, 10.0**seat.rank), DType.FLOAT32)
        group.allreduce([tensor.buffer], [tensor.buffer])
        sums.append(float(device.read(tensor)[0]))
        assert group.device_transport() == ("nccl", "")
    return sums


@on_ranks(2)
def test_the_callers_stream_waits_and_the_caller_does_not(seat: Seat) -> None:
    ring, device = opened(seat)
    tensor = device.tensor(np.zeros(1000), DType.FLOAT32)
    ring.allreduce([tensor.buffer], [tensor.buffer])
    device.synchronize()
    device.fill(tensor, seat.rank + 1.0, microseconds=100_000)  # backward, as it were
    work = ring.allreduce([tensor.buffer], [tensor.buffer], blocking=False)
    work.wait()
    assert not work.done(), "the host has waited for the device"
    assert np.all(tensor.values == 0), "the host has waited for the device"
    total, later = (device.tensor(np.zeros(1000), DType.FLOAT32) for _ in range(2))
    device.copy(total, tensor)  # comes after the sum on the stream
    device.fill(tensor, 7.0)
    device.copy(later, tensor)
    work.wait_done()
    assert np.all(device.read(total) == 3)
    assert np.all(device.read(later) == 7)


@on_ranks(2)
def test_memory_of_results_is_freed(seat: Seat) -> None:
    ring, device = opened(seat)
    own = device.tensor(np.ones(100), DType.FLOAT32)
    for _ in range(3):
        work = ring.allgather(own.buffer)
        output(work, device, own)
    work.wait_done()
    del work
    ring.barrier()
    ring._held.end(ring._native, "the test")
    ring.barrier()
    until(lambda: device.allocated() == 0)  # the progress thread drops its part a moment later


@on_ranks(1)
def test_a_captured_stream_is_refused(seat: Seat) -> None:
    ring, device = opened(seat)
    tensor = device.tensor(np.ones(3), DType.FLOAT32)
    device.capture(True)
    with pytest.raises(ValueError, match=r"rank 0: allreduce: its stream is being captured into a CUDA graph"):
        ring.allreduce([tensor.buffer], [tensor.buffer])
    device.capture(False)
    ring.allreduce([tensor.buffer], [tensor.buffer])


@on_ranks(1)
def test_a_second_device_of_a_rank_is_refused(seat: Seat) -> None:
    ring, device = opened(seat)
    own = device.tensor(np.ones(3), DType.FLOAT32)
    ring.allreduce([own.buffer], [own.buffer])
    other = FakeDevice(1).tensor(np.ones(3), DType.FLOAT32)
    with pytest.raises(ValueError, match="this one has used device 0 before, not 1"):
        ring.allreduce([other.buffer], [other.buffer])
    with pytest.raises(ValueError, match="got cuda:0 and cuda:1; move them"):
        ring.allreduce([own.buffer], [other.buffer])


@on_ranks(2, as_processes)
def test_generations_follow_one_another(seat: Seat) -> None:
    own, device = devices(), FakeDevice(seat.rank)
    before = connections()
    for generation in range(1, 7):
        ring = seat.open(generation, devices=own)
        ways = [(ring, ""), (ring, "by name"), (ring.group([0, 1]), "")]
        for group, name in ways:
            assert group is not None
            tensor = device.tensor(np.ones(3), DType.FLOAT32)
            group.allreduce([tensor.buffer], [tensor.buffer], name=name, blocking=False).wait()
            assert np.all(device.read(tensor) == 2)
        # NCCL has connected in the first generation, and in the one behind an abort.
        assert connections() - before == (3 if generation < 5 else 6)
        seat.meet()
        if generation == 4:
            ring.abort("the test ends it")
        with suppress(CollectiveAborted):
            ring.close()
        seat.opened.clear()
        del ring, group, ways


def test_a_rank_that_has_kept_no_connection() -> None:
    """As one that takes the place of a dead one: all connect anew."""

    def body(seat: Seat, without: int) -> None:
        own, device = devices(), FakeDevice(seat.rank)
        before = connections()
        for generation in (1, 2):
            ring = seat.open(generation, devices=own)
            tensor = device.tensor(np.ones(3), DType.FLOAT32)
            ring.allreduce([tensor.buffer], [tensor.buffer])
            assert np.all(device.read(tensor) == 2)
            assert connections() - before == generation
            ring.close()
            seat.opened.clear()
            del ring
            if seat.rank == without:
                own = devices()

    for without in (0, 1):
        as_processes(2, lambda seat, without=without: body(seat, without))
