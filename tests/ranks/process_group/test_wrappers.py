"""torch's own wrappers on backend "ring": they train as one process with all the data does, also after a failure."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ring_notebook.torch as hvd
from harness.waiting import until
from ring_notebook.core import world
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch, CollectiveTimeout

pytestmark = [
    pytest.mark.usefixtures("group"),
    pytest.mark.filterwarnings("ignore:`?torch.distributed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The TorchScript:DeprecationWarning"),
]
ROWS = 12  # of all ranks: one to four ranks share them evenly


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def batch(step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs, labels = torch.randn(ROWS, 16, generator=generator), torch.randint(4, (ROWS,), generator=generator)
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    return inputs[rows], labels[rows]


def train(model: nn.Module, steps: int = 3, rank: int = 0, size: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        inputs, labels = batch(step, rank, size)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def alone() -> list[Tensor]:
    model = network()
    train(model)
    return [parameter.detach() for parameter in model.parameters()]


def sharded() -> nn.Module:
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def with_views() -> nn.Module:
    return DistributedDataParallel(
        network(), gradient_as_bucket_view=True, bucket_cap_mb=0.001, find_unused_parameters=True
    )


def with_hook_that_waits() -> nn.Module:
    def hook(_state: object, bucket: Any) -> Any:
        sums = bucket.buffer().div_(dist.get_world_size())
        future = dist.all_reduce(sums, async_op=True).get_future()
        future.wait()
        return future.then(lambda done: done.value()[0])

    hook.__annotations__.clear()  # torch compares them, and not with strings
    model = DistributedDataParallel(network())
    model.register_comm_hook(None, hook)
    return model


@pytest.mark.parametrize("overlap", ["inline", "thread"])
@pytest.mark.parametrize(
    "wrap", [lambda: DistributedDataParallel(network()), with_views, with_hook_that_waits, sharded],
    ids=["ddp", "views", "hook that waits", "fsdp2"],
)  # fmt: skip
def test_training_equals_that_of_one_process(
    wrap: Callable[[], nn.Module], overlap: str, rank: int, size: int, settings: Callable[..., None]
) -> None:
    settings(overlap=overlap)
    model = wrap()
    train(model, rank=rank, size=size)
    for ours, theirs in zip(model.parameters(), alone(), strict=True):
        value = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        torch.testing.assert_close(value.detach(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.sizes(2)
@pytest.mark.timeout(30)
def test_backward_computes_while_gradients_are_reduced(rank: int, settings: Callable[..., None]) -> None:
    """Rank 1 begins its backward pass when rank 0 has come to its first layer, with the last one given away."""
    settings(overlap="thread")
    width = 600  # a layer for each bucket, once the first pass has shown their order
    model = DistributedDataParallel(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)), bucket_cap_mb=1)
    word = torch.zeros(1)
    for number in range(3):
        hidden = model.module[0].register_forward_hook(
            lambda _module, _inputs, output: output.register_hook(lambda _gradient: dist.send(word, 1)) and None
        )
        if rank != 0 or number < 2:
            hidden.remove()
        loss = model(torch.full((2, width), rank + 1.0)).sum()
        if rank == 1 and number == 2:
            dist.recv(word, 0)
        loss.backward()
    assert model.module[1].bias.grad.tolist() == [6.0] * width  # two rows in each of three passes


@pytest.mark.parametrize("by_initial_size", [True, False])
def test_ranks_with_other_numbers_of_batches(by_initial_size: bool, rank: int, size: int) -> None:
    """DistributedDataParallel's join: C++ waits for a sum whose handle Python has dropped."""
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False))
    with model.join(divide_by_initial_world_size=by_initial_size):
        for number in range(2 + rank):
            model.zero_grad()
            model(torch.ones(1, 3)).backward()
            present = sum(number < 2 + other for other in range(size))
            expected = present / size if by_initial_size else 1.0
            assert model.module.weight.grad.tolist() == [[pytest.approx(expected)] * 3]


def test_a_model_outlives_the_generation(rank: int, size: int) -> None:
    """A wrapped model of one cell trains in the next one, as does the group."""
    model = DistributedDataParallel(network())
    train(model, rank=rank, size=size)
    hvd.shutdown()
    hvd.init()
    train(model, rank=rank, size=size)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size


def in_ddp(model: nn.Module) -> None:
    train(model, steps=1)


def in_all_reduce(_model: nn.Module) -> None:
    dist.all_reduce(torch.ones(3))


def in_wait(_model: nn.Module) -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    work.wait()


def in_future(_model: nn.Module) -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    work.get_future().wait()


def until_others_wait(rank: int) -> None:
    """Return when every other rank waits for this one: what fails then is this collective, and not the one before."""
    until(lambda: all(rank in entry["missing"] for entry in world.snapshot() if entry["rank"] != rank))


@pytest.mark.sizes(3, slow=(2,))
@pytest.mark.timeout(60)
def test_gradients_that_are_reduced_at_the_end_of_backward(rank: int, size: int, settings: Callable[..., None]) -> None:
    """As those of the first pass of a static graph. Rank 1 comes when all others wait for it."""
    settings(overlap="thread")
    model = DistributedDataParallel(network(), static_graph=True)
    if rank == 1:
        until_others_wait(rank)
    train(model, rank=rank, size=size)
    for ours, theirs in zip(model.parameters(), alone(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-5, atol=1e-6)


PLACES = [in_ddp, in_all_reduce, in_wait, in_future]


@pytest.mark.sizes(3)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_rank_fails(place: Callable[[nn.Module], None], kind: str, rank: int, size: int) -> None:
    """The others raise our error with its words wherever they wait, and the next generation trains."""
    model = DistributedDataParallel(network()) if kind == "ddp" else sharded()
    train(model, steps=1, rank=rank, size=size)
    if rank == 1:
        until_others_wait(rank)
        world.fail(ValueError("boom"))
    else:
        with pytest.raises(CollectiveAborted, match="rank 1 raised ValueError: boom"):
            place(model)
    hvd.shutdown()
    hvd.init()
    train(model, steps=1, rank=rank, size=size)


@pytest.mark.sizes(3)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_an_interrupt(place: Callable[[nn.Module], None], rank: int, size: int) -> None:
    """SIGINT raises KeyboardInterrupt wherever a rank waits, and CollectiveAborted on the others."""
    model = DistributedDataParallel(network())
    train(model, steps=1, rank=rank, size=size)
    if rank == 0:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt) as interrupt:
            timer.start() or place(model)
        world.fail(interrupt.value)
    elif rank == 1:
        with pytest.raises(CollectiveAborted, match="rank 0 was interrupted"):
            place(model)
    else:
        until(lambda: world.current().communicator.aborted)  # it calls nothing meanwhile
    hvd.shutdown()
    hvd.init()
    train(model, steps=1, rank=rank, size=size)


def _calls_of_as_many_bytes(rank: int, size: int) -> list[Callable[[], object]]:
    """Calls in which rank 1 has half as many elements, of twice the size."""
    dtype, count = (torch.float64, 2 * size) if rank == 1 else (torch.float32, 4 * size)

    def tensor(times: int = 1) -> torch.Tensor:
        return torch.ones(times * count, dtype=dtype)

    def one_for_each() -> list[torch.Tensor]:
        return [tensor() for _ in range(size)]

    return [
        lambda: dist.broadcast(tensor(), 0),
        lambda: dist.all_gather(one_for_each(), tensor()),
        lambda: dist.all_gather_into_tensor(tensor(size), tensor()),
        lambda: dist.all_to_all(one_for_each(), one_for_each()),
        lambda: dist.all_to_all_single(tensor(), tensor()),
        lambda: dist.gather(tensor(), one_for_each() if rank == 0 else None),
        lambda: dist.scatter(tensor(), one_for_each() if rank == 0 else None),
    ]


def _calls_with_a_root(root: int, rank: int, size: int) -> list[Callable[[], object]]:
    parts = list(torch.ones(size, 2)) if rank == root else None
    return [
        lambda: dist.broadcast(torch.ones(2), root),
        lambda: dist.reduce(torch.ones(2), root),
        lambda: dist.gather(torch.ones(2), parts, root),
        lambda: dist.scatter(torch.ones(2), parts, root),
    ]


@pytest.mark.sizes(3)
def test_a_mismatch(rank: int, size: int) -> None:
    """Different sizes, types, roots and operations raise on every rank, and the group lives on."""
    for call in (
        lambda: dist.all_reduce(torch.ones(2 + rank)),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.float64 if rank else torch.float32)),
        lambda: dist.barrier() if rank else dist.all_reduce(torch.ones(2)),
        *_calls_of_as_many_bytes(rank, size),
        *_calls_with_a_root(rank == 1, rank, size),
    ):
        with pytest.raises(CollectiveMismatch, match="rank"):
            call()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 2


@pytest.mark.sizes(3)
def test_the_timeout_of_a_group(rank: int, size: int) -> None:
    """A collective that one rank does not call ends after the group's own limit."""
    hasty = dist.new_group(timeout=timedelta(seconds=1))
    if rank != 1:
        with pytest.raises((CollectiveTimeout, CollectiveAborted), match="rank 1 has not called it"):
            dist.all_reduce(torch.ones(2), group=hasty)
    until(lambda: world.current().communicator.aborted)  # it calls nothing meanwhile


def test_wrong_arguments(rank: int, size: int) -> None:
    """Errors before anything is sent: they name the rank, the operation and the sizes."""
    with pytest.raises(ValueError, match=rf"rank {rank}: dist.reduce_scatter_single: .* {3 * size} and 2"):
        dist.reduce_scatter_tensor(torch.empty(2), torch.empty(3 * size))
    with pytest.raises(ValueError, match=f"rank {rank}: dist.all_to_all_single: input_split_sizes"):
        dist.all_to_all_single(torch.empty(size), torch.empty(size), [1] * size, [2] * size)
    with pytest.raises(ValueError, match=rf"rank {rank}: dist.all_gather_single: .* torch.float32, got torch.float16"):
        dist.all_gather_into_tensor(torch.empty(2 * size, dtype=torch.float16), torch.empty(2))
    with pytest.raises(ValueError, match="use a group of backend 'nccl'"):
        dist.all_reduce(torch.empty(2, device="meta"))
    with pytest.raises(TypeError, match="dense tensors"):
        dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_of_two_optimizers(strategy: str, rank: int, size: int, tmp_path: Path) -> None:
    """As Muon for matrices with AdamW for the rest; a checkpoint continues both."""

    def made() -> tuple[Any, ...]:
        model = network()
        matrices, rest = ([one for one in model.parameters() if (one.dim() == 2) == flat] for flat in (True, False))
        return model, torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.Adam(rest, lr=0.01)

    def train_both(parts: tuple[Any, ...], steps: range, *place: int) -> list[Tensor]:
        model, *optimizers = parts
        for step in steps:
            inputs, labels = batch(step, *place)
            nn.functional.cross_entropy(model(inputs), labels).backward()
            for one in optimizers:
                one.step()
                one.zero_grad()
        return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()]

    folder = hvd.broadcast_object(str(tmp_path), name="folder")
    first = hvd.prepare(*made(), strategy=strategy)
    train_both(first, range(2), rank, size)
    hvd.checkpoint(*first, folder=folder, background=True).write_last()
    again = hvd.prepare(*made(), strategy=strategy)
    hvd.checkpoint(*again, folder=folder, background=True, resume=True)
    expected = train_both(made(), range(4), 0, 1)
    for ours, theirs in zip(train_both(again, range(2, 4), rank, size), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_layer_that_is_trained_later(strategy: str, rank: int) -> None:
    """DDP would leave it to each rank: the step is refused until the model is prepared again."""
    model = network()
    frozen = next(iter(model.parameters())).requires_grad_(False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = hvd.prepare(model, optimizer, strategy=strategy)
    inner = model.module if strategy == "ddp" else model
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, *batch(0, 0, 1)[0].shape[1:]), rank + 1.0)).sum().backward()
        if step == 1 and strategy == "ddp":
            with pytest.raises(RuntimeError, match="got requires_grad after prepare"):
                optimizer.step()
            model, optimizer = hvd.prepare(model, optimizer, strategy=strategy)
        else:
            optimizer.step()
        if step == 0:
            next(iter(inner.parameters())).requires_grad_(True)
    assert frozen.requires_grad == (strategy == "ddp")
    hvd.check(inner)


def test_wrong_strategies() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="strategy must be 'ddp' or 'fsdp', got 'zero'"):
        hvd.prepare(model, optimizer, strategy="zero")
    with pytest.raises(TypeError, match="num_groups"):
        hvd.prepare(model, optimizer, strategy="ddp", num_groups=2)
    for objects in ((model,), (model, network(), optimizer)):
        with pytest.raises(TypeError, match="takes one model and its optimizers, got"):
            hvd.prepare(*objects, strategy="fsdp")
    temperature = torch.ones((), requires_grad=True)
    for strategy in ("ddp", "fsdp"):
        with pytest.raises(ValueError, match="1 of 2 parameters of SGD are not in the model"):
            hvd.prepare(model, torch.optim.SGD([model[0].bias, temperature]), strategy=strategy)


def test_process_group_again(group: Any, rank: int, size: int) -> None:
    """The same group as long as it fits, another one for another backend; Gloo's ends when a rank fails."""
    assert hvd.process_group() is group
    gloo = hvd.process_group("gloo")
    assert hvd.process_group("gloo") is gloo
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size
    world.abort("rank 0 raised ValueError: boom")
    hvd.shutdown()
    assert not dist.is_initialized()
    hvd.init()
    again = hvd.process_group("gloo")
    dist.all_reduce(tensor, group=again)
    assert tensor.item() == size * size
    dist.destroy_process_group()
