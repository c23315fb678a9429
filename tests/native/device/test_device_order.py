"""All ranks launch the operations of all groups in one order, whatever the order in which they call them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from native.fakes.device import FakeDevice, devices, knobs
from native.ranks import Seat, as_hosts, as_threads, on_ranks
from ring_notebook.core.buffers import DType

ROUNDS = 30


@pytest.fixture(autouse=True)
def _soon() -> Iterator[None]:
    """Kernels in different orders wait for one another; the fake ends the process when they have for so long."""
    with knobs(nccl_deadlock_ms=3000, nccl_launch_us=100):
        yield


def crosswise(seat: Seat) -> None:
    """Each rank starts the operations of several groups in an order of its own."""
    ring, device = seat.open(devices=devices()), FakeDevice(seat.rank)
    groups = [ring.group(range(seat.size)) for _ in range(3)]
    order = groups[seat.rank % 3 :] + groups[: seat.rank % 3]
    for number in range(ROUNDS):
        tensors = [device.tensor(np.full(10, 1.0 + number), DType.FLOAT32) for _ in order]
        works = [
            group.allreduce([tensor.buffer], [tensor.buffer], blocking=False)
            for group, tensor in zip(order, tensors, strict=True)
            if group is not None
        ]
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            assert np.all(device.read(tensor) == seat.size * (1.0 + number))


def test_groups_of_the_same_ranks() -> None:
    as_threads(3, crosswise)


@on_ranks(2)
def test_last_calls_that_cross(seat: Seat) -> None:
    """Each rank is the last to come to another group, and could launch that one before it sees that both may go."""
    ring, device = seat.open(devices=devices()), FakeDevice(seat.rank)
    groups = [ring.group([0, 1]) for _ in range(2)]
    first, second = groups[seat.rank], groups[1 - seat.rank]
    assert first is not None
    assert second is not None
    for number in range(ROUNDS):
        tensors = [device.tensor(np.full(10, 1.0 + number), DType.FLOAT32) for _ in range(2)]
        works = []
        for group, tensor in zip((first, second), tensors, strict=True):
            seat.meet()
            works.append(group.allreduce([tensor.buffer], [tensor.buffer], blocking=False))
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            assert np.all(device.read(tensor) == 2 * (1.0 + number))


def test_groups_between_hosts() -> None:
    as_hosts(3, crosswise)


@on_ranks(2)
def test_names_beside_groups(seat: Seat) -> None:
    ring, device = seat.open(devices=devices()), FakeDevice(seat.rank)
    for number in range(ROUNDS):
        tensors = {place: device.tensor(np.ones(10), DType.FLOAT32) for place in ("queue", "lane")}
        places = ["queue", "lane"] if seat.rank == 0 else ["lane", "queue"]
        works = {}
        for place in places:
            buffers = [tensors[place].buffer]
            name = f"n{number}" if place == "lane" else ""
            works[place] = ring.allreduce(buffers, buffers, name=name, blocking=False)
        for place in places:
            works[place].wait()
            assert np.all(device.read(tensors[place]) == seat.size)


def test_an_operation_that_a_rank_has_yet_to_call_keeps_no_other_one_waiting() -> None:
    def body(seat: Seat) -> None:
        ring, device = seat.open(devices=devices()), FakeDevice(seat.rank)
        one, other = ring.group([0, 1]), ring.group([0, 1])
        assert one is not None
        assert other is not None
        early = device.tensor(np.ones(10), DType.FLOAT32)
        work = None
        if seat.rank == 0:
            work = one.allreduce([early.buffer], [early.buffer], blocking=False)
        for _ in range(3):
            tensor = device.tensor(np.ones(10), DType.FLOAT32)
            other.allreduce([tensor.buffer], [tensor.buffer])
            assert np.all(device.read(tensor) == 2)  # waits for the device before it calls the early one
        if work is None:
            work = one.allreduce([early.buffer], [early.buffer], blocking=False)
        work.wait()
        assert np.all(device.read(early) == 2)

    as_threads(2, body)
    as_hosts(2, body)
