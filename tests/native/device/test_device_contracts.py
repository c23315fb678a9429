"""Whatever ends an operation on devices: each rank learns of it, and no tensor is freed under a kernel."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from native.fakes.device import FakeDevice, devices, knobs
from native.ranks import Dead, Seat, as_hosts, as_processes, as_threads, on_ranks
from native.values import Tensor
from ring_notebook.core.buffers import Buffer, DType
from ring_notebook.core.communicator import Communicator
from ring_notebook.errors import CollectiveAborted, CollectiveError, CollectiveMismatch, CollectiveTimeout


def opened(seat: Seat, **settings: Any) -> tuple[Communicator, FakeDevice]:
    """A generation in which NCCL has connected, on all ranks; nothing is under way."""
    ring, device = seat.open(devices=devices(**settings)), FakeDevice(seat.rank)
    tensor = ones(device)
    ring.allreduce([tensor.buffer], [tensor.buffer]).wait_done()
    seat.meet()
    return ring, device


def ones(device: FakeDevice, count: int = 100, dtype: DType = DType.FLOAT32, owner: Any = None) -> Tensor:
    return device.tensor(np.ones(count), dtype, owner)


def host(count: int = 100) -> Tensor:
    array = np.ones(count, np.float32)
    return Tensor(array, Buffer(array.ctypes.data, array.shape, DType.FLOAT32, array))


@pytest.mark.parametrize("launch", [as_threads, as_hosts])
def test_mismatches_are_raised_on_every_rank_and_the_group_lives_on(launch: Any) -> None:
    def body(seat: Seat) -> None:
        ring, device = opened(seat)
        first = seat.rank == 0
        cases = [
            (host() if first else ones(device), "cpu tensors.*cuda tensors|cuda tensors.*cpu tensors"),
            (ones(device, dtype=DType.INT16 if first else DType.FLOAT32), "same dtype"),
            (ones(device, 3 if first else 4), "same shape"),
        ]
        for tensor, said in cases:
            with pytest.raises(CollectiveMismatch, match=said):
                ring.allreduce([tensor.buffer], [tensor.buffer])
        tensor = ones(device)
        ring.allreduce([tensor.buffer], [tensor.buffer])
        assert np.all(device.read(tensor) == seat.size)

    launch(3, body)


@on_ranks(2)
def test_a_mismatch_before_the_ranks_have_agreed_on_anything(seat: Seat) -> None:
    ring, device = seat.open(devices=devices()), FakeDevice(seat.rank)
    tensor = host() if seat.rank == 0 else ones(device)
    with pytest.raises(CollectiveMismatch, match="move the tensors to the same kind of device"):
        ring.allreduce([tensor.buffer], [tensor.buffer])
    assert ring.device_transport() == ("", "")


@pytest.mark.parametrize("launch", [as_threads, as_hosts])
@pytest.mark.parametrize("connected", [True, False])
def test_a_rank_that_leaves(launch: Any, connected: bool) -> None:
    def body(seat: Seat) -> None:
        if connected:
            ring, device = opened(seat)
        else:
            ring, device = seat.open(devices=devices()), FakeDevice(seat.rank)
        if seat.rank == 1:
            ring.close()
            return
        tensor = ones(device)
        with pytest.raises(CollectiveAborted, match="left"):
            ring.allreduce([tensor.buffer], [tensor.buffer])

    launch(2, body)


def stuck(seat: Seat, **settings: Any) -> tuple[Communicator, FakeDevice, Any, Tensor]:
    """An operation that this rank's kernel waits in: that of rank 0 comes when the generation has ended."""
    ring, device = opened(seat, **settings)
    tensor = ones(device)
    if seat.rank == 0:
        device.hold_until_abort()
    work = ring.allreduce([tensor.buffer], [tensor.buffer], blocking=False)
    work.wait()
    seat.meet()
    return ring, device, work, tensor


@on_ranks(3, as_processes, gives=[Dead(9), "told", "told"])
def test_a_rank_that_dies_behind_the_gate(seat: Seat) -> str:
    _, _, work, _ = stuck(seat)
    if seat.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveAborted, match=r"rank 0 \(process \d+\) has died"):
        work.wait_done()
    return "told"


@pytest.mark.parametrize("connected", [True, False])
@on_ranks(2, as_processes, gives=[Dead(9), "told"])
def test_a_rank_that_dies_before_the_gate(seat: Seat, connected: bool) -> str:
    if connected:
        ring, device = opened(seat)
    else:
        ring, device = seat.open(devices=devices()), FakeDevice(seat.rank)
    if seat.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = ones(device)
    with pytest.raises(CollectiveAborted, match=r"rank 0 .* has died"):
        ring.allreduce([tensor.buffer], [tensor.buffer])
    return "told"


@on_ranks(2, as_processes, gives=[Dead(9), "told"])
def test_a_rank_that_dies_while_nccl_connects(seat: Seat) -> str:
    ring, device = seat.open(devices=devices()), FakeDevice(seat.rank)
    tensor = ones(device)
    with knobs(nccl_init_hangs=1):
        work = ring.allreduce([tensor.buffer], [tensor.buffer], blocking=False)
        if seat.rank == 0:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CollectiveAborted, match=r"rank 0 .* has died"):
            work.wait()
    return "told"


def test_a_timeout_behind_the_gate() -> None:
    def body(seat: Seat) -> str:
        ring, device = opened(seat)
        tensor = ones(device)
        if seat.rank == 1:
            seat.meet()
            ring.limit_time(1.0)
        else:
            device.hold_until_abort()
        work = ring.allreduce([tensor.buffer], [tensor.buffer], blocking=False)
        if seat.rank == 0:
            while ring.snapshot()[0]["state"] != "waiting":  # it has come; the limit of rank 1 is that of its kernel
                time.sleep(0.001)
            seat.meet()
        with pytest.raises(CollectiveTimeout if seat.rank == 1 else CollectiveAborted) as caught:
            work.wait_done()
        return str(caught.value)

    told = as_processes(2, body)
    assert all("rank 1: allreduce" in text and "timed out on its device" in text for text in told), told


def test_an_asynchronous_error_of_nccl() -> None:
    def body(seat: Seat) -> str:
        ring, device = opened(seat)
        with knobs(**({"nccl_error_at": 1} if seat.rank == 1 else {})):
            tensor = ones(device)
            work = ring.allreduce([tensor.buffer], [tensor.buffer], blocking=False)
            with pytest.raises(CollectiveError) as caught:
                work.wait_done()
        return str(caught.value)

    told = as_processes(2, body)
    assert all("remote process exited or there was a network error" in text for text in told), told


def test_a_kernel_that_no_abort_ends() -> None:
    """Its memory is never freed, and the process says that it has to be restarted; host memory works on."""

    class Owner:
        freed = False

        def __init__(self, array: Any) -> None:
            self.array = array

        def __del__(self) -> None:
            Owner.freed = True

    def body(seat: Seat) -> None:
        own = devices(abort_limit=0.3)
        ring, device = seat.open(devices=own), FakeDevice(seat.rank)
        array = np.ones(100, np.float32)
        tensor = ones(device, owner=Owner(array))
        ring.allreduce([tensor.buffer], [tensor.buffer])
        device.synchronize()
        if seat.rank == 0:
            device.hold(until=lambda: False)
        work = ring.allreduce([tensor.buffer], [tensor.buffer], blocking=False)
        work.wait()
        with knobs(nccl_abort_hangs=1):
            seat.meet()
            ring.abort("the test ends it")
            with pytest.raises(CollectiveAborted, match="the test ends it"):
                work.wait_done()
            ring.close()
        del tensor, work, ring
        seat.opened.clear()
        gc.collect()
        assert not Owner.freed
        assert "restart this engine" in own.given_up
        again = seat.open(2, devices=own)
        again.allreduce([host().buffer], [host().buffer])
        with pytest.raises(ValueError, match=r"RING_ABORT_LIMIT\); restart this engine"):
            again.allreduce([ones(device).buffer], [ones(device).buffer])

    as_processes(2, body)


@on_ranks(2)
def test_tensors_live_until_their_kernel_has_ended(seat: Seat) -> None:
    ring, device = opened(seat)
    at_the_end: list[Any] = []

    class Owner:
        def __init__(self, array: Any) -> None:
            self.array = array
            self.work: Any = None

        def __del__(self) -> None:
            at_the_end.append(self.work.done())

    big = np.ones(100, np.float32)
    owner = Owner(big)
    tensor = device.tensor(big, DType.FLOAT32, owner)
    device.fill(tensor, 1.0, 200_000)
    work = ring.allreduce([tensor.buffer], [tensor.buffer], blocking=False)
    owner.work = native = work._native
    work.wait()
    keep = tensor.array  # the memory itself; what is asked is when its owner is dropped
    del work, tensor, owner
    gc.collect()
    assert at_the_end == []
    while not native.done():
        time.sleep(0.001)
    more = ones(device)
    ring.allreduce([more.buffer], [more.buffer])  # lets go of what is done
    assert at_the_end == [True]
    assert np.all(keep == seat.size)
