"""send and recv on backend "ring", and pipelines over them: they train as the whole model does in one process."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import ring_notebook.torch as hvd
from ring_notebook.core import world
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch, RingError

pytestmark = [pytest.mark.sizes(3, slow=(2, 4)), pytest.mark.usefixtures("group")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("count", [0, 3, 200_000])
def test_around_the_ring(dtype: torch.dtype, count: int, rank: int, size: int) -> None:
    sent = torch.full((count,), rank + 1).to(dtype)
    got = torch.empty(count, dtype=dtype)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, (rank + 1) % size), dist.P2POp(dist.irecv, got, (rank - 1) % size)]
    )
    for work in works:
        work.wait()
    assert torch.equal(got, torch.full((count,), (rank - 1) % size + 1).to(dtype))


def test_a_strided_tensor(rank: int) -> None:
    whole = torch.zeros(4, 6)
    if rank == 0:
        dist.send(torch.arange(12.0).view(4, 3), 1)
    elif rank == 1:
        dist.recv(whole[:, ::2], 0)
        assert torch.equal(whole[:, ::2], torch.arange(12.0).view(4, 3))
        assert whole[:, 1::2].count_nonzero() == 0


def test_any_source(rank: int, size: int) -> None:
    if rank:
        dist.send(torch.tensor([float(rank)]), 0, tag=5)
        return
    got = torch.empty(1)
    sources = {dist.recv(got, tag=5): got.item() for _ in range(size - 1)}
    assert sources == {other: float(other) for other in range(1, size)}


def test_objects(rank: int) -> None:
    if rank == 0:
        dist.send_object_list([1, {"a": "b"}], 1)
    elif rank == 1:
        got: list[Any] = [None, None]
        dist.recv_object_list(got, 0)
        assert got == [1, {"a": "b"}]


def test_other_sizes(rank: int) -> None:
    if rank == 0:
        with pytest.raises(CollectiveMismatch, match="rank 1 expected 99999 elements"):
            dist.send(torch.zeros(100_000), 1)
    elif rank == 1:
        with pytest.raises(CollectiveMismatch, match="expected 99999 elements of float32, got 100000"):
            dist.recv(torch.zeros(99_999), 0)


def test_a_future_of_a_receive(rank: int) -> None:
    if rank == 0:
        work = dist.irecv(torch.zeros(1), 1)
        assert work is not None
        with pytest.raises(RingError, match="call wait"):
            work.get_future()
        work.wait()
    elif rank == 1:
        dist.send(torch.zeros(1), 0)


def test_the_face(rank: int) -> None:
    """The same under the names of ring."""
    if rank == 0:
        hvd.send(torch.arange(3), 1, tag=1)
        hvd.synchronize(hvd.isend(torch.arange(100_000), 1))
    elif rank == 1:
        small, large = torch.zeros(3, dtype=torch.int64), torch.zeros(100_000, dtype=torch.int64)
        handle = hvd.irecv(large, 0)
        assert hvd.recv(small, tag=1) == 0
        assert hvd.synchronize(handle) == 0
        assert torch.equal(small, torch.arange(3))
        assert torch.equal(large, torch.arange(100_000))


def test_an_interrupt(rank: int) -> None:
    """SIGINT ends a receive, and the generation for the ranks that wait elsewhere."""
    if rank == 0:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt) as interrupt:
            timer.start() or dist.recv(torch.zeros(1), 1)
        world.fail(interrupt.value)
    else:
        with pytest.raises(CollectiveAborted, match="rank 0 was interrupted"):
            dist.barrier()


def stage(index: int) -> nn.Sequential:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh())


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator)


def step(schedule: Any, rank: int, size: int) -> None:
    inputs, target = batch()
    if rank == 0:
        schedule.step(inputs)
    elif rank == size - 1:
        schedule.step(target=target, losses=[])
    else:
        schedule.step()


def meet_and_step(schedule: Any, rank: int, size: int) -> None:
    dist.barrier()
    step(schedule, rank, size)


@pytest.mark.filterwarnings("ignore")  # torch's own, of this part that is new
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B], ids=lambda one: one.__name__)
def test_a_pipeline(schedule: Any, rank: int, size: int) -> None:
    """Gradients of this stage as those of the whole model; after a rank has failed the next generation trains."""
    own = stage(rank)
    run = schedule(PipelineStage(own, rank, size, torch.device("cpu")), 4, loss_fn=loss_of)
    step(run, rank, size)
    whole = nn.Sequential(*[stage(index) for index in range(size)])
    inputs, target = batch()
    for part, wanted in zip(inputs.chunk(4), target.chunk(4), strict=True):
        (loss_of(whole(part), wanted) / 4).backward()
    for ours, theirs in zip(own.parameters(), whole[rank].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    if rank == size - 1:
        dist.barrier()
        world.fail(ValueError("boom"))
    else:
        with pytest.raises(CollectiveAborted, match="boom"):
            meet_and_step(run, rank, size)
    hvd.shutdown()
    hvd.init()
    again = schedule(PipelineStage(own, rank, size, torch.device("cpu")), 4, loss_fn=loss_of)
    step(again, rank, size)
