"""Shares of data, prepare, and what is measured on the way: the gradient noise scale."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from ranks.joint_training import make_model, momentum
from ranks.values import randn
from ring_notebook.core import metrics
from ring_notebook.torch.training.loaders import shard


def everyone(hvd: ModuleType, loader: Any) -> list[list[Any]]:
    """What each rank's loader yields in one pass."""
    return hvd.allgather_object([batch.tolist() if isinstance(batch, Tensor) else batch for batch in loader])  # type: ignore[no-any-return]


class Numbers(IterableDataset[int]):
    """0, 1, ... count - 1."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def test_sampler_joins_to_the_batches_of_one_process_and_shuffles_again(hvd: ModuleType) -> None:
    size = hvd.size()
    data = list(range(12 * size))
    plain = everyone(hvd, DataLoader(data, 4, sampler=hvd.DistributedSampler(data, shuffle=False)))  # type: ignore[arg-type]
    for step in range(3):
        joined = sorted(number for batches in plain for number in batches[step])
        assert joined == data[step * 4 * size : (step + 1) * 4 * size]
    sampler = hvd.DistributedSampler(data, seed=3)
    passes = [list(sampler) for _ in range(3)]
    assert passes[0] != passes[1] != passes[2]
    sampler.set_epoch(1)
    assert list(sampler) == passes[1]
    for one in passes:
        assert sorted(number for part in hvd.allgather_object(one) for number in part) == data


def test_sampler_makes_up_or_drops_the_rest(hvd: ModuleType) -> None:
    size = hvd.size()
    data = list(range(3 * size + 1))
    made_up = hvd.allgather_object(list(hvd.DistributedSampler(data, shuffle=False)))
    assert {len(part) for part in made_up} == {4 if size > 1 else len(data)}
    assert {number for part in made_up for number in part} == set(data)
    cut = hvd.allgather_object(list(hvd.DistributedSampler(data, shuffle=False, drop_last=True)))
    assert {len(part) for part in cut} == {3 if size > 1 else len(data)}


def test_one_rank_may_look_at_a_batch(hvd: ModuleType) -> None:
    data = list(range(8 * hvd.size()))
    loader = shard(DataLoader(data, 2, shuffle=True))  # type: ignore[arg-type]
    last = hvd.rank() == hvd.size() - 1

    def look() -> None:
        if last:
            next(iter(loader))

    orders = []
    for _ in range(3):
        look()
        orders.append(everyone(hvd, loader))
        assert sorted(number for part in orders[-1] for batch in part for number in batch) == data
    starts = []
    for _ in range(3):  # passes that are not ended are shuffled again too
        batches = iter(loader)
        starts.append(next(batches).tolist())
        look()
        hvd.allreduce(torch.ones(1))
        starts[-1] += next(batches).tolist()
        look()
    order = everyone(hvd, loader)
    assert sorted(number for part in order for batch in part for number in batch) == data
    everything = [repr(part[hvd.rank()][:2]) for part in (*orders, order)] + [repr([s[:2], s[2:]]) for s in starts]
    assert len(set(everything)) > 5, "7 passes, of which two may begin alike by chance"


@pytest.mark.parametrize("kind", ["sampler", "iterable"])
def test_a_loader_of_an_earlier_generation_serves_fewer_ranks(hvd: ModuleType, kind: str) -> None:
    data: Any = list(range(24)) if kind == "sampler" else Numbers(24)
    loader = shard(DataLoader(data, 2))
    everyone(hvd, loader)
    size, rank = hvd.size(), hvd.rank()
    hvd.shutdown()
    fewer = list(range(max(1, size - 1)))
    if rank in fewer:
        hvd.init(fewer)
        seen = [number for batches in everyone(hvd, loader) for batch in batches for number in batch]
        assert sorted(seen) == list(range(24))
        if kind == "sampler":
            assert len(loader) == 24 // len(fewer) // 2
        hvd.shutdown()
    hvd.init()


def test_shard_keeps_what_the_loader_was_made_with(hvd: ModuleType) -> None:
    def collate(batch: list[int]) -> int:
        return len(batch)

    newer = {"in_order": False} if "in_order" in inspect.signature(DataLoader).parameters else {}
    given: Any = DataLoader(list(range(4 * hvd.size())), 3, collate_fn=collate, drop_last=True, **newer)  # type: ignore[arg-type]
    loader = shard(given)
    assert loader.collate_fn is collate
    assert vars(loader).get("in_order") == vars(given).get("in_order")
    assert list(loader) == [3]
    with pytest.raises(TypeError, match="got list"):
        shard([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", ["inline", "thread"])
def test_prepare_of_two_models_that_train_each_other(
    hvd: ModuleType, settings: Callable[..., None], overlap: str
) -> None:
    """A GAN: the generator's loss also gives the discriminator gradients, which its own next step leaves out."""
    settings(overlap=overlap)
    size = hvd.size()
    real = randn(torch.Generator().manual_seed(0), 12 * 4, 2) + 3
    noise = randn(torch.Generator().manual_seed(1), 12 * 4, 3)

    def train(wrap: Callable[..., Any], own: slice) -> list[nn.Module]:
        torch.manual_seed(2)
        generator, discriminator = nn.Linear(3, 2), nn.Linear(2, 1)
        generator, generates = wrap(generator, momentum(generator))
        discriminator, judges = wrap(discriminator, momentum(discriminator))
        loss = nn.functional.binary_cross_entropy_with_logits
        for step in range(4):
            rows = slice(step * 12, (step + 1) * 12)
            good, made = real[rows][own], generator(noise[rows][own])
            judges.zero_grad()
            verdict = discriminator(torch.cat([good, made.detach()]))
            loss(verdict, torch.cat([torch.ones(len(good), 1), torch.zeros(len(made), 1)])).backward()
            judges.step()
            generates.zero_grad()
            loss(discriminator(made), torch.ones(len(made), 1)).backward()
            generates.step()
        return [generator, discriminator]

    alone = train(lambda *given: given, slice(0, 12))
    together = train(hvd.prepare, slice(hvd.rank() * 12 // size, (hvd.rank() + 1) * 12 // size))
    for mine, theirs in zip(together, alone, strict=True):
        hvd.check(mine)
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_prepare_returns_what_it_takes_in_its_order(hvd: ModuleType) -> None:
    """As accelerate: several models, optimizers, loaders and schedulers, in any order."""
    generator, discriminator = make_model(seed=hvd.rank()), make_model(seed=hvd.rank() + 9)
    first, second = momentum(generator), momentum(discriminator)
    schedule = torch.optim.lr_scheduler.StepLR(second, 1, gamma=0.1)
    data = DataLoader(TensorDataset(torch.arange(12.0 * hvd.size())[:, None]), 4)
    loader, g, schedule_too, g_opt, d_opt, d, again = hvd.prepare(
        data, generator, schedule, first, second, discriminator, data
    )
    assert (g, d, schedule_too) == (generator, discriminator, schedule)
    assert isinstance(g_opt, torch.optim.SGD)
    assert g_opt.state is first.state
    assert d_opt.state is second.state
    assert again is loader
    assert len(list(loader)) == 3
    hvd.check(g, g_opt)
    hvd.check(d, d_opt)
    assert sorted(d_opt._parameter_names.values()) == sorted(f"model 1: {name}" for name, _ in d.named_parameters())
    d(torch.ones(1, 7)).sum().backward()
    d_opt.step()
    schedule.step()
    assert d_opt.param_groups[0]["lr"] == pytest.approx(0.005)
    assert hvd.prepare(generator) is generator  # one alone comes back alone


def test_prepare_scales_the_learning_rate_once(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = momentum(model)
    for _ in range(2):  # as a cell that is run again
        _, prepared = hvd.prepare(model, optimizer, scale_lr=True, compression=hvd.Compression.fp16)
        assert prepared.param_groups[0]["lr"] == pytest.approx(0.05 * hvd.size())
    unscaled = hvd.prepare(model, momentum(model))[1]
    assert unscaled.param_groups[0]["lr"] == 0.05


def noisy_training(hvd: ModuleType, optimizer: Any, w: Tensor, steps: int, *, passes: int = 1, way: str = "") -> None:
    """Per sample a gradient of 0.5 plus noise of variance 4 in every direction, in batches of 16: B_simple is 16."""
    generator = torch.Generator().manual_seed(hvd.rank())
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            noise = randn(generator, len(w)) * 2.0 / math.sqrt(16)
            with optimizer.no_sync() if way == "no_sync" and number < passes - 1 else nullcontext():
                (w * (0.5 + noise)).sum().backward()
            if way == "accumulate" or number == passes - 1:
                optimizer.step()
                optimizer.zero_grad()
        hvd.log(step=step)


@pytest.mark.parametrize("overlap", ["inline", "thread"])
@pytest.mark.parametrize(
    ("passes", "way", "options"),
    [
        (1, "", {"op": "Sum"}),
        (1, "", {"gradient_predivide_factor": 2.0}),
        (4, "backward_passes_per_step", {}),
        (3, "no_sync", {}),
        (3, "no_sync", {"op": "Sum"}),
        (4, "accumulate", {}),
        (4, "accumulate", {"op": "Sum"}),
    ],
)
def test_prepare_puts_the_noise_scale_into_the_rows(
    hvd: ModuleType, settings: Callable[..., None], overlap: str, passes: int, way: str, options: dict[str, Any]
) -> None:
    settings(overlap=overlap)
    w = nn.Parameter(torch.zeros(2000))
    loader = DataLoader(list(range(640)), 16)  # type: ignore[arg-type]
    _, optimizer, _ = hvd.prepare(
        nn.ParameterList([w]),
        torch.optim.SGD([w], lr=0.0),
        loader,
        noise_scale=5,
        **({} if way in ("", "no_sync") else {way: passes}),
        **options | {"op": getattr(hvd, options.get("op", "Average"))},
    )
    metrics.begin()
    try:
        noisy_training(hvd, optimizer, w, 80, passes=passes, way=way)
        batches = metrics.drain("run", 0)
        rows = [dict(zip(("time", "step", *b.names), row, strict=True)) for b in batches for row in b.rows()]
    finally:
        metrics.end()
    values = [row.get("noise_scale", math.nan) for row in rows]
    if hvd.size() == 1:
        assert all(math.isnan(value) for value in values)
        return
    assert all(math.isnan(value) for value in values[:4])
    assert len(set(values[4:])) == 16, "measured in every 5th step, and in all rows"
    assert values[-1] == hvd.noise_scale(optimizer) == pytest.approx(16.0, rel=0.15)
    assert hvd.allgather_object(values[-1]) == [values[-1]] * hvd.size()


def test_noise_scale_needs_a_batch_size_and_leaves_out_overflows(hvd: ModuleType) -> None:
    w = nn.Parameter(torch.zeros(2000))
    model = nn.ParameterList([w])
    _, optimizer = hvd.prepare(model, torch.optim.SGD([w], lr=0.0))
    with pytest.raises(ValueError, match="pass batch_size, or give the loader to prepare"):
        hvd.noise_scale(optimizer)
    assert math.isnan(hvd.noise_scale(optimizer, 16))
    noisy_training(hvd, optimizer, w, 40)
    before = hvd.noise_scale(optimizer)
    assert (before == pytest.approx(16.0, rel=0.2)) is (hvd.size() > 1)
    optimizer.zero_grad()
    (w * math.inf).sum().backward()
    optimizer.step()
    with torch.no_grad():
        w.zero_()
    noisy_training(hvd, optimizer, w, 1)
    after = hvd.noise_scale(optimizer)
    assert (after == pytest.approx(before, rel=0.2)) is (hvd.size() > 1)
    data = TensorDataset(torch.zeros(8, 2))
    for loader in (
        DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False)),
        DataLoader(data, 4),
    ):
        optimizer = hvd.prepare(model, torch.optim.SGD([w], lr=0.0), loader)[1]
        assert optimizer._reducer.batch_size == 4
    with pytest.raises(ValueError, match="noise_scale must be at least 1"):
        hvd.prepare(model, torch.optim.SGD([w], lr=0.0), loader, noise_scale=-1)
    with pytest.raises(TypeError, match="an optimizer from DistributedOptimizer"):
        hvd.noise_scale(torch.optim.SGD([w], lr=0.1))
    with pytest.raises(TypeError, match="without op=Adasum and sync_every"):
        hvd.prepare(model, torch.optim.SGD([w], lr=0.0), loader, noise_scale=True, op=hvd.Adasum)


def test_empty_is_a_tensor_in_ring_memory(hvd: ModuleType) -> None:
    for tensor, shape, dtype in (
        (hvd.empty(5), (5,), torch.float32),
        (hvd.empty(2, 3, dtype=torch.int64), (2, 3), torch.int64),
        (hvd.empty((4, 1), dtype=torch.bfloat16), (4, 1), torch.bfloat16),
        (hvd.empty(0, 3), (0, 3), torch.float32),
    ):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        tensor.fill_(2)
        assert torch.equal(hvd.allreduce_(tensor, op=hvd.Sum), torch.full(shape, 2 * hvd.size(), dtype=dtype))
