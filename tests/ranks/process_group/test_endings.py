"""Ranks that fail, are interrupted or disagree at any moment of a step: nobody hangs, and the next step trains."""

from __future__ import annotations

import gc
import io
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import ring_notebook.torch as hvd
from ring_notebook.core import world
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch, CollectiveTimeout, RingError
from ring_notebook.torch.process_group.run_store import keys_of_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:`?torch.distributed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The TorchScript:DeprecationWarning"),
]
WIDTH = 20_000  # so that gradients, shards and activations are not small


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4)]


def ddp() -> Callable[[], object]:
    """A forward pass, which broadcasts buffers, and a backward pass."""
    model = DistributedDataParallel(nn.Sequential(*layers()))
    return lambda: model(torch.ones(4, 8)).sum().backward()


def fsdp2() -> Callable[[], object]:
    model = nn.Sequential(*layers())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return lambda: model(torch.ones(4, 8)).sum().backward()


def pipeline() -> Callable[[], object]:
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(nn.Tanh(), rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4)
    inputs = torch.ones(8, WIDTH)
    return lambda: schedule.step(inputs) if rank == 0 else schedule.step()


PLACES = [(ddp, "inline"), (ddp, "thread"), (fsdp2, "inline"), (pipeline, "inline")]


def fails(_step: Callable[[], object]) -> None:
    raise ValueError("boom")


def is_interrupted(step: Callable[[], object]) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    step()


def disagrees(_step: Callable[[], object]) -> None:
    """Another collective, and in a pipeline a message that the next stage does not expect."""
    if dist.get_rank() + 1 < dist.get_world_size():
        dist.isend(torch.ones(3), dist.get_rank() + 1)
    dist.all_reduce(torch.ones(7))
    raise AssertionError("the others called it too")


ENDS: list[tuple[Callable[[Callable[[], object]], None], type[BaseException]]] = [
    (fails, ValueError),
    (is_interrupted, KeyboardInterrupt),
    (disagrees, CollectiveMismatch),
]
ROUNDS = [1, pytest.param(20, marks=pytest.mark.slow)]


@pytest.mark.sizes(3)
@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize(("ends", "error"), ENDS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize(("place", "overlap"), PLACES, ids=lambda value: getattr(value, "__name__", value))
def test_a_step_that_a_rank_ends(
    place: Any, overlap: str, ends: Any, error: Any, rounds: int, rank: int, settings: Callable[..., None]
) -> None:
    settings(overlap=overlap)
    for number in range(rounds):
        hvd.init()
        hvd.process_group()
        step = place()
        moment = random.Random(number).random() * 0.02
        try:
            step()
            if rank == 1:
                time.sleep(moment)
                ends(step)
            else:
                for _ in range(1000):  # until it ends
                    step()
            raise AssertionError("the step ended well")
        except (error, CollectiveAborted, CollectiveMismatch) as raised:
            world.fail(raised)
        hvd.shutdown()
    hvd.init()
    hvd.process_group()
    place()()
    hvd.shutdown()


@pytest.mark.sizes(3)
def test_a_default_group_that_one_rank_could_not_make(rank: int, size: int) -> None:
    """torch.distributed has counted it there. Names of later groups must not differ, or their members never meet."""
    hvd.init()
    if dist.is_initialized():  # by a test before this one
        dist.destroy_process_group()
    if rank == 1:
        with pytest.raises(RingError, match=f"is rank 1 of {size}, and torch.distributed was told rank 0 of 7"):
            dist.init_process_group("ring", store=dist.HashStore(), rank=0, world_size=7)
    hvd.shutdown()
    hvd.init()
    dist.init_process_group("ring", timeout=timedelta(seconds=20))
    part = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    if rank < 2:
        dist.barrier(part)
    hvd.shutdown()


@pytest.mark.sizes(2)
@pytest.mark.parametrize("half_made", [False, True])
def test_an_interrupt_while_the_default_group_is_made(
    half_made: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are told, none begins a generation alone, and the next group is made."""
    hvd.init()
    if dist.is_initialized():
        dist.destroy_process_group()
    make = c10d._new_process_group_helper

    def interrupted(*args: Any, **options: Any) -> Any:
        if rank == 1:
            if half_made:
                make(*args, **options)
            raise KeyboardInterrupt
        while not half_made and not world.is_aborted():
            time.sleep(0.001)
        return make(*args, **options)

    monkeypatch.setattr(c10d, "_new_process_group_helper", interrupted)
    raised: BaseException | None = None
    try:
        hvd.process_group()
    except (KeyboardInterrupt, CollectiveAborted) as error:
        raised = error
        world.fail(error)
    assert type(raised) is (KeyboardInterrupt if rank == 1 else type(None) if half_made else CollectiveAborted)
    monkeypatch.undo()
    hvd.shutdown()
    hvd.init()
    hvd.process_group()
    dist.barrier()
    hvd.shutdown()


@pytest.mark.sizes(2)
@pytest.mark.timeout(100)
@pytest.mark.parametrize("in_cycle", [False, True])
def test_a_wrapper_that_goes_while_its_group_works(in_cycle: bool, rank: int) -> None:
    """A thread of Gloo needs the interpreter to end an operation in which a value of Python is in effect."""
    hvd.init()
    backend = hvd.process_group("gloo")._get_backend(torch.device("cpu"))
    model = DistributedDataParallel(nn.Linear(2, 2))
    torch.save(model, file := io.BytesIO())
    assert b"ring_notebook" not in file.getvalue()  # it can be loaded where we are not installed
    if in_cycle:
        model.own = [model]
    if rank == 0:  # behind the gate; it ends when rank 1 closes its connection
        torch._C._stash_obj_in_tls("ring_notebook", object())
        backend.allreduce([torch.ones(3)])
        torch._C._stash_obj_in_tls("ring_notebook", None)
    del backend
    hvd.barrier()
    if rank == 1:
        time.sleep(0.2)  # so that rank 0 waits when the operation ends
    dist.destroy_process_group()
    del model
    gc.collect()
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.sizes(1, 2)
def test_a_store_that_ends_writes_into_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may open a file as soon as the descriptor of the store is closed, and gets its number."""
    hvd.init()
    of_others = tmp_path / "log"
    of_others.touch()
    close, opened = os.close, list[int]()

    def close_and_open(descriptor: int) -> None:
        close(descriptor)
        opened.append(os.open(of_others, os.O_RDWR))

    monkeypatch.setattr(os, "close", close_and_open)
    ring: list[Any] = [keys_of_ranks()]
    ring.append(ring)  # which the collector of garbage ends in its own order
    ring[0].set("key", "value")
    hvd.barrier()
    del ring
    gc.collect()
    monkeypatch.undo()
    for descriptor in opened:
        os.close(descriptor)
    assert of_others.read_bytes() == b""


@pytest.mark.sizes(2)
@pytest.mark.parametrize("backend", ["ring", "gloo"])
def test_a_present_group_takes_another_timeout(rank: int, backend: str) -> None:
    hvd.init()
    first = hvd.process_group(backend)
    assert hvd.process_group(backend, timeout=timedelta(seconds=1.0)) is first
    if rank == 0:
        with pytest.raises(CollectiveTimeout):
            dist.all_reduce(torch.ones(1))
    else:
        time.sleep(2.0)
    with suppress(CollectiveAborted):
        hvd.shutdown()
