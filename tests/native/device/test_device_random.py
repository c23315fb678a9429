"""Random operations on devices over three communicators, with delays, aborts and deaths: right sums, and no hang."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from native.fakes.device import FakeDevice, devices, knobs
from native.ranks import Dead, Seat, as_hosts, as_processes
from native.values import Tensor, decode
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator, Work
from ring_notebook.errors import CollectiveAborted

SIZE = 3
GROUPS = ((0, 1, 2), (0, 1), (1, 2))
KINDS = ("allreduce", "allreduce", "fused", "named", "broadcast", "allgather", "alltoall", "int16", "host")
DTYPES = {"int16": DType.INT16}


class Rank:
    """One rank's part of a plan that all of them draw from the same seed."""

    def __init__(self, seat: Seat, ring: Communicator, seed: object) -> None:
        self.rank = seat.rank
        self.plan = random.Random(str(seed))
        self.own = random.Random(f"{seed} {seat.rank}")
        self.device = FakeDevice(seat.rank)
        groups = [ring.group(members) for members in GROUPS[1:]]
        self.groups = [ring, *groups]
        self.under_way: list[tuple[Work, list[tuple[Tensor, float]], Any]] = []
        self.operations = 0

    def act(self, number: int) -> None:
        which, kind = self.plan.randrange(len(GROUPS)), self.plan.choice(KINDS)
        count, blocking = self.plan.choice((1, 7, 1000, 70_000)), self.plan.random() < 0.5
        group, members = self.groups[which], GROUPS[which]
        if group is None:
            return
        self.operations += 1
        if self.own.random() < 0.1:
            time.sleep(self.own.random() * 0.003)
        weights = [number % 11 + member + 1 for member in members]
        sums = float(sum(weights))
        mine = float(weights[group.rank])
        if kind == "host":
            group.barrier()
        elif kind in ("allgather", "alltoall"):
            self.gather(group, kind, count, blocking, weights)
        elif kind == "broadcast":
            root = number % len(members)
            tensor = self.tensor(mine, count)
            self.note(
                group.broadcast(tensor.buffer, tensor.buffer, root, blocking=blocking), [(tensor, float(weights[root]))]
            )
        else:
            tensors = [
                self.tensor(mine, count, DTYPES.get(kind, DType.FLOAT32)) for _ in range(3 if kind == "fused" else 1)
            ]
            buffers = [tensor.buffer for tensor in tensors]
            name = f"number {number}" if kind == "named" else ""
            work = group.allreduce(buffers, buffers, name=name, blocking=blocking and not name)
            self.note(work, [(tensor, sums) for tensor in tensors])
        if self.own.random() < 0.2:
            self.settle()

    def tensor(self, value: float, count: int, dtype: DType = DType.FLOAT32) -> Tensor:
        tensor = self.device.tensor(np.zeros(count), dtype)
        if dtype is DType.FLOAT32:
            self.device.fill(tensor, value, self.own.choice((0, 0, 500)))
        else:
            tensor.array[...] = value
        return tensor

    def gather(self, group: Communicator, kind: str, count: int, blocking: bool, weights: list[int]) -> None:
        rows = min(count, 1000)
        if kind == "allgather":
            tensor = self.tensor(float(weights[group.rank]), rows)
            work = group.allgather(tensor.buffer, blocking=blocking)
        else:
            tensor = self.tensor(float(weights[group.rank]), rows * group.size)
            work = group.alltoall([tensor.buffer], [rows] * group.size, blocking=blocking)
        self.note(work, [], np.repeat(np.array(weights, float), rows))

    def note(self, work: Work, expected: list[tuple[Tensor, float]], gathered: Any = None) -> None:
        self.under_way.append((work, expected, gathered))

    def settle(self) -> None:
        for work, expected, gathered in self.under_way:
            work.wait()
            seen = [self.device.read(tensor) for tensor, _ in expected]
            raw = b""
            if gathered is not None:
                result = work.device_output()
                raw = self.device.bytes_at(result.address, result.nbytes)
            work.wait_done()  # raises where the kernel has been aborted: what has been read then is anything
            for values, (_, value) in zip(seen, expected, strict=True):
                assert np.all(values == value), (self.operations, value)
            if gathered is not None:
                assert np.array_equal(decode(np.frombuffer(raw, np.float32), DType.FLOAT32), gathered)
        self.under_way.clear()


def live(seat: Seat, operations: int, generations: int, seed: int, death: bool = False) -> int:
    """Several generations; every second one is aborted at some operation by some rank. At the end some rank may die."""
    own, done = devices(), 0
    for generation in range(1, generations + 1):
        plan = random.Random(f"{seed} {generation}")
        last = generation == generations
        ends_at = plan.randrange(operations) if (generation % 2 == 0 or (death and last)) else None
        by = plan.randrange(seat.size)
        ring = seat.open(generation, devices=own)
        rank = None
        try:
            rank = Rank(seat, ring, (seed, generation))
            for number in range(operations):
                if number == ends_at and by == seat.rank:
                    if death and last:
                        os.kill(os.getpid(), signal.SIGKILL)
                    ring.abort("the plan says so")
                rank.act(number)
            rank.settle()
            ring.barrier()
            assert ends_at is None, "an abort was not seen"
        except CollectiveAborted:
            assert ends_at is not None
        if rank:
            done += rank.operations
            rank.device.synchronize()  # what has been launched writes to tensors that go now
        with suppress(CollectiveAborted):
            ring.close()
        seat.opened.remove(ring)
        assert own.given_up == ""
    return done


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where the fake NCCL keeps the files in which communicators meet."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with knobs(cuda_delay_us=50, nccl_kernel_us=200):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operations", "generations"), [(60, 4), pytest.param(800, 20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_random_operations(operations: int, generations: int) -> None:
    done = as_processes(SIZE, lambda seat: live(seat, operations, generations, seed=7))
    if generations == 20:
        assert sum(done) > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 12))
def test_random_operations_and_a_death(seed: int) -> None:
    ended = as_processes(SIZE, lambda seat: live(seat, 40, 1, seed, death=True))
    assert [one.signal for one in ended if isinstance(one, Dead)] == [signal.SIGKILL]


@pytest.mark.parametrize("operations", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_random_operations_between_hosts(operations: int) -> None:
    as_hosts(SIZE, lambda seat: live(seat, operations, 2, seed=3))
