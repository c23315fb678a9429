"""Seeded random schedules of the named lane: whatever ranks start in whatever order, what comes out is the same."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from native.ranks import Seat, on_ranks
from native.values import Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.work import Work
from ring_notebook.errors import CollectiveMismatch

NAMES = 4


def play(ring: Communicator, seed: int) -> None:
    """One schedule: some names on all ranks, one of other shapes, sums in order between them, and a join.

    What is done is the same on all ranks, when it is done is chosen by each rank: its order, pauses, what it waits for.
    """
    common, own = random.Random(seed), random.Random(seed * 1000 + ring.rank)
    odd = common.randrange(2 * NAMES)  # a name that ranks give other shapes, in every second schedule
    leaver = common.randrange(ring.size)  # has no part of the last name: joins before
    started: dict[int, tuple[Tensor, Work]] = {}
    order = [name for name in range(NAMES) if name < NAMES - 1 or ring.rank != leaver]
    own.shuffle(order)
    between = common.randrange(3)
    for name in order:
        count = 3 + (name == odd and ring.rank == leaver)
        tensor = Tensor.of(ring, np.full(count, 1.0 + name), DType.FLOAT32)
        started[name] = tensor, ring.allreduce([tensor.buffer], [tensor.buffer], name=f"{name}", blocking=False)
        if own.random() < 0.3:
            time.sleep(own.random() * 1e-3)
    for _ in range(between):
        total = Tensor.of(ring, np.ones(2), DType.FLOAT32)
        ring.allreduce([total.buffer], [total.buffer])
        assert total.values.tolist() == [ring.size] * 2
    waited = sorted(started, key=lambda _: own.random())[: own.randrange(NAMES)]
    for name in waited:
        if name < NAMES - 1:  # the last one needs the join of another rank, which may wait for this one
            finish(ring, name, odd, *started.pop(name))
    assert ring.join().last_rank() in range(ring.size)
    for name, (tensor, work) in started.items():
        finish(ring, name, odd, tensor, work)


def finish(ring: Communicator, name: int, odd: int, tensor: Tensor, work: Work) -> None:
    if name == odd and name < NAMES - 1:
        with pytest.raises(CollectiveMismatch, match="same shape"):
            work.wait()
        return
    work.wait()
    posted = ring.size - (name == NAMES - 1)
    assert tensor.values.tolist() == [posted * (1.0 + name)] * len(tensor.values)


@pytest.mark.parametrize("hosts", [(), (0, 1, 0)])
@pytest.mark.parametrize("schedules", [30, pytest.param(500, marks=pytest.mark.slow)])
@on_ranks(3, limit=1000.0)
def test_schedules_of_the_named_lane(seat: Seat, schedules: int, hosts: tuple[int, ...]) -> None:
    ring = seat.open()
    for seed in range(schedules):
        play(ring, seed)
