"""A failure on a device that nobody has waited for: leaving the generation raises it once, unless a call has raised."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from harness.programs import ringrun
from native.device.test_device_contracts import ones, opened
from native.fakes.device import FakeDevice, devices, environment, knobs
from native.ranks import Seat, as_processes, on_ranks
from ring_notebook.core.communicator import Communicator
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch


def failed(seat: Seat, ring: Communicator, device: FakeDevice) -> None:
    """An operation that NCCL ends with an error after both ranks have gone on; the generation has ended with it."""
    tensor, launched = ones(device), threading.Event()
    device.hold(until=launched.is_set)
    with knobs(nccl_error_at=1):
        ring.allreduce([tensor.buffer], [tensor.buffer], name="w")
        seat.meet()
        launched.set()
        while not ring.aborted:
            threading.Event().wait(0.001)
    seat.meet()


@on_ranks(2, as_processes)
def test_an_operation_that_nobody_waits_for(seat: Seat) -> None:
    ring, device = opened(seat)
    failed(seat, ring, device)
    with pytest.raises(CollectiveAborted, match=r"allreduce 'w'.*remote process exited"):
        ring.close()
    ring.close()


@on_ranks(2, as_processes)
def test_an_operation_of_another_group(seat: Seat) -> None:
    """Nobody closes that group: leaving the generation waits for it."""
    ring, device = seat.open(devices=devices()), FakeDevice(seat.rank)
    group = ring.group([0, 1])
    assert group is not None
    tensor, begun = ones(device), threading.Event()
    group.allreduce([tensor.buffer], [tensor.buffer]).wait_done()
    seat.meet()
    device.hold(until=begun.is_set)
    with knobs(nccl_error_at=1):
        group.allreduce([tensor.buffer], [tensor.buffer], name="w")
        seat.meet()
        threading.Timer(0.2, begun.set).start()  # when this rank waits in close, as a rule
        with pytest.raises(CollectiveAborted, match=r"allreduce 'w'.*remote process exited"):
            ring.close()


@pytest.mark.parametrize("how", ["waited", "called", "aborted"])
@on_ranks(2, as_processes)
def test_what_somebody_has_been_told(seat: Seat, how: str) -> None:
    ring, device = opened(seat)
    failed(seat, ring, device)
    if how == "aborted":
        ring.abort("this rank knows")
    else:
        with pytest.raises(CollectiveAborted, match="remote process exited"):
            ring.barrier() if how == "called" else ring.allreduce([ones(device).buffer], [ones(device).buffer])
    ring.close()


@on_ranks(2, as_processes)
def test_a_mismatch_tells_nothing_of_it(seat: Seat) -> None:
    ring, device = opened(seat)
    tensor = ones(device, 3 + seat.rank)
    with pytest.raises(CollectiveMismatch):
        ring.allreduce([tensor.buffer], [tensor.buffer])
    failed(seat, ring, device)
    with pytest.raises(CollectiveAborted):
        ring.close()


@on_ranks(2)
def test_an_operation_that_ends_well_while_the_group_is_left(seat: Seat) -> None:
    ring, device = opened(seat)
    group = ring.group([0, 1])
    assert group is not None
    tensors = [ones(device), ones(device)]
    first = ones(device)
    group.allreduce([first.buffer], [first.buffer]).wait_done()
    begun = threading.Event()
    device.hold(until=begun.is_set)
    for one, tensor in zip((ring, group), tensors, strict=True):
        one.allreduce([tensor.buffer], [tensor.buffer])
    seat.meet()
    threading.Timer(0.2, begun.set).start()
    ring.close()
    assert all(np.all(device.read(tensor) == 2) for tensor in tensors)


@on_ranks(2, as_processes)
def test_an_interrupt_is_what_ended_it(seat: Seat) -> None:
    """KeyboardInterrupt where the signal came; nothing more when that rank leaves."""
    ring, device = opened(seat)
    if seat.rank == 0:
        device.hold_until_abort()
    tensor = ones(device)
    work = ring.allreduce([tensor.buffer], [tensor.buffer], blocking=False)
    work.wait()
    seat.meet()
    if seat.rank == 1:
        while not ring.aborted:  # on a busy machine the signal may arrive before the wait begins
            timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start() or work.wait_done()
        ring.close()
        return
    with suppress(CollectiveAborted):
        work.wait_done()
    ring.close()


SCRIPT = """
import ctypes, time
from ring_notebook.config import config
from ring_notebook.core import world
from ring_notebook.core.buffers import DType
from ring_notebook.core.gpu_check_rank import GpuMemory

world.init()
ring, memory = world.current().communicator, GpuMemory(config().cuda_library, 0)
tensor = memory.buffer(bytes(4), DType.FLOAT32, (1,))
ring.allreduce([tensor], [tensor]).wait_done()
ring.barrier()
ctypes.CDLL(config().nccl_library).fake_nccl_set(b"error_at", ctypes.c_long(1))
memory.call(lambda: time.sleep(0.5))
ring.allreduce([tensor], [tensor])
print("the last line", flush=True)
"""


def test_a_script_whose_last_operation_fails(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = ringrun("-np", "2", sys.executable, script, env=os.environ | environment())
    assert ended.returncode == 1, ended.stderr
    assert "the last line" in ended.stdout
    assert "CollectiveAborted: " in ended.stderr
    assert "remote process exited or there was a network error" in ended.stderr
