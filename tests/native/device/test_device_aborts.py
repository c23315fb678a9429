"""An abort finds an operation on devices wherever it is on its way, and no rank waits for what will not come."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

from native.fakes.device import FakeDevice, devices, knobs
from native.ranks import Dead, Seat, as_processes, on_ranks
from ring_notebook.core.buffers import DType
from ring_notebook.errors import CollectiveAborted


@on_ranks(2, as_processes)
def test_a_named_operation_that_is_being_launched(seat: Seat) -> None:
    """It has left its queue by then, and ends with its kernel."""
    ring, device = seat.open(devices=devices()), FakeDevice(seat.rank)
    tensor = device.tensor(np.ones(10), DType.FLOAT32)
    ring.allreduce([tensor.buffer], [tensor.buffer], name="before", blocking=False).wait_done()
    seat.meet()
    with knobs(nccl_launch_late_us=500_000):
        work = ring.allreduce([tensor.buffer], [tensor.buffer], name="late", blocking=False)
        if seat.rank == 1:
            time.sleep(0.2)  # until it is being launched, as a rule
            ring.abort("rank 1 was told to")
        with pytest.raises(CollectiveAborted, match="rank 1 was told to"):
            work.wait_done()


@on_ranks(2, as_processes, gives=[Dead(9), "told"])
def test_a_copy_to_host_memory_behind_a_kernel_that_never_ends(seat: Seat) -> str:
    """The thread that makes it is the one that aborts the kernel."""
    with knobs(cuda_no_pinning=1):  # such a copy blocks until it is done
        ring, device, other = seat.open(devices=devices()), FakeDevice(seat.rank), FakeDevice(seat.rank)
        second = ring.group([0, 1])
        assert second is not None
        for group in (ring, second):
            tensor = device.tensor(np.ones(10), DType.FLOAT32)
            group.allreduce([tensor.buffer], [tensor.buffer]).wait_done()
        seat.meet()
        slow, late = device.tensor(np.ones(10), DType.INT16), other.tensor(np.ones(10), DType.INT16)
        kernel = other.tensor(np.ones(10), DType.FLOAT32)
        if seat.rank == 0:
            other.hold(until=lambda: False)
        stuck = ring.allreduce([kernel.buffer], [kernel.buffer], blocking=False)
        stuck.wait()  # what comes next on that stream waits for the kernel, and that of rank 1 for rank 0
        looked = threading.Event()
        device.hold(until=looked.is_set)
        works = [
            ring.allreduce([slow.buffer], [slow.buffer], blocking=False),
            second.allreduce([late.buffer], [late.buffer], blocking=False),
        ]
        time.sleep(0.1)  # until both have been looked at, as a rule
        looked.set()
        seat.meet()
        time.sleep(0.1)  # until the first one is copied, as a rule
        if seat.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        for work in (stuck, works[1]):  # the first one may have ended
            with pytest.raises(CollectiveAborted, match=r"rank 0 .* has died"):
                work.wait_done()
        return "told"


@pytest.mark.parametrize("launched", [False, True], ids=["before it is launched", "while its kernel runs"])
@on_ranks(2, as_processes)
def test_a_signal_interrupts_an_operation(seat: Seat, launched: bool) -> None:
    """As a notebook's stop button does: KeyboardInterrupt here, a named abort there, and the next generation works."""
    own, device = devices(), FakeDevice(seat.rank)
    ring = seat.open(devices=own)
    tensor = device.tensor(np.ones(10), DType.FLOAT32)
    ring.allreduce([tensor.buffer], [tensor.buffer]).wait_done()
    seat.meet()
    if launched:
        if seat.rank == 0:
            device.hold_until_abort()
        work = ring.allreduce([tensor.buffer], [tensor.buffer], blocking=False)
        work.wait()
    seat.meet()

    def wait() -> None:
        if launched:
            work.wait_done()
        else:
            ring.allreduce([tensor.buffer], [tensor.buffer])

    if seat.rank == 1:
        while not ring.aborted:  # on a busy machine the signal may arrive before the wait begins
            timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start() or wait()
    else:
        while not ring.aborted:
            time.sleep(0.001)
        with pytest.raises(CollectiveAborted, match="rank 1 was interrupted"):
            wait()
    ring.close()
    ring = seat.open(2, devices=own)
    more = device.tensor(np.ones(10), DType.FLOAT32)
    ring.allreduce([more.buffer], [more.buffer])
    assert np.all(device.read(more) == 2)
