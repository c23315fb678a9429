"""Tests that run twice: with tensors in host memory, and the same again with tensors on late devices of the fakes.

On devices they try three ranks, one type of each kernel and two calls; the others are slow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from native.collectives.matrix import KERNELS
from native.fakes.device import CUDA, NCCL, FakeDevice, devices, knobs
from native.ranks import Seat
from native.values import Array, Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator

__all__ = ["also_on_devices", "is_slow", "tensors_on_devices"]

CALL = "allreduce staged"

also_on_devices = pytest.mark.parametrize("tensors_on", ["host", "device"], indirect=True)


def is_slow(params: dict[str, Any]) -> bool:
    """Whether a test with these parameters runs when asked for slow tests only."""
    if params.get("tensors_on") != "device":
        return False
    dtype = params.get("dtype", DType.FLOAT32)
    usual = KERNELS if params.get("launcher", "threads") == "threads" else (DType.FLOAT32,)
    call = params.get("call", CALL)
    beside = (
        params.get("aborter") or params.get("in_group") or (params.get("launcher") == "hosts" and "dtype" not in params)
    )
    return bool(params.get("size", 3) != 3 or dtype not in usual or call not in (CALL, "alltoall") or beside)


@contextmanager
def tensors_on_devices() -> Iterator[None]:
    """Within, `Tensor.of` makes tensors on the device of its rank, and `Seat.open` generations that move them.

    What a stream does is late, so that who does not wait for it sees something else.
    """
    NCCL(), CUDA()  # compiled before ranks are forked
    known: dict[tuple[int, int], FakeDevice] = {}

    def make(communicator: Communicator, values: Array, dtype: DType) -> Tensor:
        rank = communicator.ranks[communicator.rank]
        key = (os.getpid(), rank)
        device = known.get(key) or known.setdefault(key, FakeDevice(rank))
        tensor = device.tensor(values, dtype)
        tensor.arrive = device.synchronize
        return tensor

    Tensor.on_device, Seat.make_devices = staticmethod(make), staticmethod(devices)  # type: ignore[assignment]
    try:
        with knobs(cuda_delay_us=300):
            yield
    finally:
        Tensor.on_device = Seat.make_devices = None
