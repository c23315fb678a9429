"""What CUDA and NCCL ask of a program that only real ones would show: whose device it is, graphs, faults, late ends."""

from __future__ import annotations

import threading
import time
from math import inf
from typing import Any

import numpy as np
import pytest

from native.device.test_device_contracts import ones, opened, stuck
from native.fakes.device import FakeDevice, copies_under_way, devices, ended_late, knobs
from native.ranks import Seat, as_processes, on_ranks
from native.values import Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator
from ring_notebook.errors import CollectiveAborted, RingError

_FAULT = 700  # illegal address


def used(seat: Seat) -> tuple[Any, Communicator, FakeDevice, Tensor]:
    """The devices of a rank, a communicator that has reduced a tensor there, the device and the tensor."""
    own = devices()
    ring, device = seat.open(devices=own), FakeDevice(seat.rank)
    tensor = ones(device)
    ring.allreduce([tensor.buffer], [tensor.buffer]).wait_done()
    seat.meet()
    return own, ring, device, tensor


@on_ranks(2, as_processes, gives=[None, None])
def test_each_rank_connects_on_its_own_device(seat: Seat) -> None:
    """NCCL takes the device that is current on its caller's thread; the fake ends a process that gives it another."""
    ring, device = seat.open(devices=devices()), FakeDevice(seat.rank + 2)
    tensor = ones(device)
    ring.allreduce([tensor.buffer], [tensor.buffer])
    assert np.all(device.read(tensor) == seat.size)
    assert ring.device_transport() == ("nccl", "")


@on_ranks(2, as_processes)
def test_a_graph_may_be_captured_while_operations_are_under_way(seat: Seat) -> None:
    """The thread that looks after them makes calls which spoil what another thread captures, unless it says so."""
    ring, device = opened(seat)
    tensor, captures, begun = ones(device), FakeDevice(seat.rank), threading.Event()
    device.hold(until=begun.is_set)
    work = ring.allreduce([tensor.buffer], [tensor.buffer], blocking=False)
    work.wait()
    captures.capture(True)
    begun.set()
    work.wait_done()
    assert captures.capture(False), "the graph was spoilt"
    assert np.all(device.read(tensor) == seat.size)


@on_ranks(1, as_processes)
def test_the_default_stream_while_a_graph_is_captured_on_another_one(seat: Seat) -> None:
    ring, device = opened(seat)
    device.capture(True)
    device.stream = 0  # the default one
    tensor = ones(device)
    with pytest.raises(ValueError, match="being captured into a CUDA graph"):
        ring.allreduce([tensor.buffer], [tensor.buffer])


@on_ranks(2, as_processes)
def test_a_kernel_of_the_user_that_has_gone_wrong(seat: Seat) -> None:
    """No word of graphs: the error, what it means for the engine, and the same for all that is called later."""
    own, ring, _, tensor = used(seat)
    if seat.rank == 0:
        with knobs(cuda_fault=_FAULT):
            for _ in range(2):
                with pytest.raises((RingError, ValueError), match=r"illegal memory access.*restart this engine"):
                    ring.allreduce([tensor.buffer], [tensor.buffer], name="w")
        assert "restart this engine" in own.given_up
        ring.abort("rank 0 gives up")
        return
    with pytest.raises(CollectiveAborted, match="rank 0 gives up"):
        ring.allreduce([tensor.buffer], [tensor.buffer], name="w").wait_done()
    assert own.given_up == ""


@on_ranks(2, as_processes)
def test_a_device_that_fails_under_an_operation(seat: Seat) -> None:
    own, ring, device, tensor = used(seat)
    if seat.rank == 0:
        device.hold_until_abort()
    work = ring.allreduce([tensor.buffer], [tensor.buffer], blocking=False)
    work.wait()
    seat.meet()
    said = r"rank 0 stopped .*illegal memory access"
    with knobs(cuda_fault=_FAULT if seat.rank == 0 else 0), pytest.raises(CollectiveAborted, match=said):
        work.wait_done()
    assert ("restart this engine" in own.given_up) is (seat.rank == 0)


@pytest.mark.parametrize("limit", [5.0, inf])
@on_ranks(2, as_processes)
def test_kernels_that_end_behind_their_abort(seat: Seat, limit: float) -> None:
    """A tensor is its caller's again when no kernel touches it, whatever NCCL says of its abort."""
    with knobs(nccl_ends_late_us=300_000):
        ring, _, work, _ = stuck(seat, abort_limit=limit)
        if seat.rank == 1:
            ring.abort("rank 1 was told to")
        with pytest.raises(CollectiveAborted, match="rank 1 was told to"):
            work.wait_done()
        assert ended_late() == 1
        with pytest.raises(CollectiveAborted, match="rank 1 was told to"):
            ring.barrier()


@pytest.mark.filterwarnings("ignore:tensors on GPUs go through host memory")
@pytest.mark.parametrize("count", [10, 100_000])
@pytest.mark.parametrize("how", [{}, {"cuda_no_pinning": 1}, {"cuda_no_pinning": 1, "cuda_reaches": 1}], ids=str)
@on_ranks(2, as_processes)
def test_copies_to_host_memory_that_outlive_their_call(seat: Seat, count: int, how: dict[str, int]) -> None:
    with knobs(**how, cuda_delay_us=20_000):
        ring, device = seat.open(devices=devices(choice="host")), FakeDevice(seat.rank)
        tensor = device.tensor(np.full(count, seat.rank + 1), DType.FLOAT32)
        ring.allreduce([tensor.buffer], [tensor.buffer])
        assert np.all(device.read(tensor) == 3)


@pytest.mark.filterwarnings("ignore:tensors on GPUs go through host memory")
@on_ranks(2, as_processes)
def test_an_abort_while_a_device_copies_to_host_memory(seat: Seat) -> None:
    """The tensor is its caller's again when the copies have ended."""
    ring, device = seat.open(devices=devices(choice="host")), FakeDevice(seat.rank)
    tensor = ones(device)
    ring.allreduce([tensor.buffer], [tensor.buffer], blocking=False).wait_done()
    with knobs(cuda_delay_us=300_000):
        work = ring.allreduce([tensor.buffer], [tensor.buffer], blocking=False)
        time.sleep(0.02)
        ring.abort("it was told to")
        with pytest.raises(CollectiveAborted):
            work.wait_done()
        assert copies_under_way() == 0


@pytest.mark.filterwarnings("ignore:tensors on GPUs go through host memory")
@on_ranks(2)
def test_what_refuses_nccl_is_said_to_all_ranks(seat: Seat) -> None:
    own = devices(refusal="it is forbidden here") if seat.rank == 1 else devices()
    ring, device = seat.open(devices=own), FakeDevice(seat.rank)
    tensor = ones(device)
    ring.allreduce([tensor.buffer], [tensor.buffer])
    assert np.all(device.read(tensor) == seat.size)
    assert ring.device_transport() == ("host", "rank 1: it is forbidden here")
