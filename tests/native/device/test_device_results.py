"""Collectives on devices in the order of the caller's stream; `over_devices.py` has the tests of their results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from harness.waiting import until
from native.fakes.device import FakeDevice, connections, devices, knobs
from native.ranks import LAUNCHERS, Seat, as_processes, on_ranks
from native.values import expected, sample
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.partition import row_split
from ring_notebook.errors import CollectiveAborted


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    """What a stream does is late, so that who does not wait for it sees something else."""
    with knobs(cuda_delay_us=300):
        yield


def opened(seat: Seat, **settings: Any) -> tuple[Communicator, FakeDevice]:
    return seat.open(devices=devices(**settings)), FakeDevice(seat.rank)


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
        assert work.device_output().nbytes == own.buffer.nbytes * seat.size
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
