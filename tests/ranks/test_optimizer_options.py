"""The options of DistributedOptimizer, its face as an optimizer, and what it leaves behind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from ranks.training import assert_trains_alike, loss_of, make_model, momentum, plain_step


@pytest.mark.parametrize("options", [{"num_groups": 1}, {"num_groups": 3}, {"num_groups": 9}, {"groups": 2}], ids=str)
@pytest.mark.parametrize("overlap", ["inline", "thread"])
def test_groups_by_number(
    hvd: ModuleType, settings: Callable[..., None], options: dict[str, Any], overlap: str
) -> None:
    settings(overlap=overlap, fusion_threshold=0)
    assert_trains_alike(hvd, **options)


def test_groups_of_parameters(hvd: ModuleType) -> None:
    models: list[nn.Module] = []

    def make() -> nn.Module:
        models.append(make_model())
        return models[-1]

    reference, model = make(), make()
    groups = [[model.first.weight, model.second.bias]]
    optimizer = hvd.DistributedOptimizer(momentum(model), groups=groups)
    batch = torch.ones(2, 7), torch.ones(2, 3)
    plain_step(model, optimizer, batch)
    plain_step(reference, momentum(reference), batch)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    with pytest.raises(ValueError, match="lists of parameters"):
        hvd.DistributedOptimizer(momentum(model), groups=["first"])
    with pytest.raises(ValueError, match="num_groups=-1"):
        hvd.DistributedOptimizer(momentum(model), num_groups=-1)


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "own"])
@pytest.mark.parametrize("overlap", ["inline", "thread"])
def test_compression(hvd: ModuleType, settings: Callable[..., None], compression: str, overlap: str) -> None:
    class Own:
        @staticmethod
        def compress(tensor: Tensor) -> tuple[Tensor, torch.Size]:
            return tensor.flatten().double(), tensor.shape

        @staticmethod
        def decompress(tensor: Tensor, ctx: torch.Size) -> Tensor:
            return tensor.view(ctx).float()

    settings(overlap=overlap)
    chosen = Own if compression == "own" else getattr(hvd.Compression, compression)
    tolerance = {"fp16": 2e-3, "bf16": 2e-2}.get(compression, 1e-6)
    assert_trains_alike(hvd, compression=chosen, rtol=1e-5, atol=tolerance)


def test_predivide_factor_and_sum(hvd: ModuleType) -> None:
    assert_trains_alike(hvd, gradient_predivide_factor=4.0)

    def summed(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        alone = len(batch[0]) > 6 or hvd.size() == 1
        (loss_of(model, batch) if alone else loss_of(model, batch) / hvd.size()).backward()
        optimizer.step()

    assert_trains_alike(hvd, step, build=summed, op=hvd.Sum)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        hvd.DistributedOptimizer(momentum(make_model()), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="takes Average, Sum or Adasum"):
        hvd.DistributedOptimizer(momentum(make_model()), op=hvd.Max)


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients(hvd: ModuleType, sparse_as_dense: bool) -> None:
    class Lookup(nn.Module):
        """A table whose rows are looked up sparsely, and a dense layer."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(50, 7, sparse=True)
            self.dense = nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.dense(self.table((x[:, 0].abs() * 20).long().clamp(max=49)))
            return out

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    assert_trains_alike(hvd, build=sgd, make=Lookup, sparse_as_dense=sparse_as_dense)


def test_process_set(hvd: ModuleType) -> None:
    evens = hvd.add_process_set(range(0, hvd.size(), 2))
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=evens)
    (model(torch.full((1, 2), float(hvd.rank())))).sum().backward()
    optimizer.step()
    members = list(range(0, hvd.size(), 2))
    expected = sum(members) / len(members) if hvd.rank() in members else float(hvd.rank())
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), -expected))


def test_adasum_of_parallel_steps_is_one_step_and_of_orthogonal_steps_their_sum(hvd: ModuleType) -> None:
    if hvd.size() not in (1, 2, 4):
        pytest.skip("Adasum is defined for powers of two")
    size, rank = hvd.size(), hvd.rank()
    parallel, orthogonal = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(size))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parallel, orthogonal], lr=1.0), op=hvd.Adasum)
    parallel.grad = torch.ones(size)
    orthogonal.grad = torch.eye(size)[rank]
    optimizer.step()
    torch.testing.assert_close(parallel.detach(), -torch.ones(size))
    torch.testing.assert_close(orthogonal.detach(), -torch.ones(size))
    optimizer.synchronize()
    with pytest.raises(RuntimeError, match="Adasum"):
        optimizer.skip_synchronize()


def test_is_an_optimizer_of_the_same_class(hvd: ModuleType) -> None:
    model = make_model()
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert optimizer.param_groups[0] is inner.param_groups[0]
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    plain_step(model, optimizer, (torch.ones(2, 7), torch.ones(2, 3)))
    assert calls == ["pre"], "step hooks run once"
    plain = torch.optim.Adam(make_model().parameters(), lr=0.5)
    plain.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.01
    plain_step(model, optimizer, (torch.ones(2, 7), torch.ones(2, 3)))
    assert float(optimizer.state[model.first.weight]["step"]) == 2


def test_is_copied_as_the_optimizer_it_wraps(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model))
    plain_step(model, optimizer, (torch.ones(2, 7), torch.ones(2, 3)))
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(twin) is torch.optim.SGD
        torch.testing.assert_close(twin.state_dict(), optimizer.state_dict())
        twin.step()


@pytest.mark.parametrize("overlap", ["inline", "thread"])
def test_join_lets_the_others_make_more_steps(hvd: ModuleType, settings: Callable[..., None], overlap: str) -> None:
    """Rank r has data for r steps; the gradients of those that have joined are zeros."""
    settings(overlap=overlap)
    size, rank = hvd.size(), hvd.rank()
    w = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0))
    for _ in range(rank):
        optimizer.zero_grad()
        (w.sum() * (rank + 1)).backward()
        optimizer.step()
    assert hvd.join() == size - 1
    there = [[r + 1 for r in range(size) if r > step] for step in range(rank)]
    torch.testing.assert_close(w.detach(), torch.full((3,), -sum(sum(step) for step in there) / size))


def test_names_that_are_doubled_missing_or_no_pairs(hvd: ModuleType) -> None:
    model = make_model()
    named = list(model.named_parameters())
    doubled = [("first.weight", p) for _, p in named]
    for bad, match in (
        (doubled, "more than once: first.weight"),
        (named[1:], r"lacks .*group 0 parameter 0 of shape \(13, 7\)"),
        ([p for _, p in named], "pairs"),
    ):
        with pytest.raises(ValueError, match=match):
            hvd.DistributedOptimizer(momentum(model), named_parameters=bad)
    with pytest.raises(ValueError, match="backward_passes_per_step=0"):
        hvd.DistributedOptimizer(momentum(model), backward_passes_per_step=0)


def test_different_models_are_named(hvd: ModuleType) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank agrees with itself")
    model = nn.Linear(3 + (hvd.rank() == 1), 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    model(torch.ones(1, model.in_features)).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"'weight' \(2, 3\) float32 on rank 0 and 'weight' \(2, 4\) float32 on rank 1"
    ):
        optimizer.step()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_different_thresholds_are_named(hvd: ModuleType, settings: Callable[..., None]) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank agrees with itself")
    settings(fusion_threshold=100 + hvd.rank())
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model))
    with pytest.raises(RuntimeError, match="RING_FUSION_THRESHOLD"):
        plain_step(model, optimizer, (torch.ones(2, 7), torch.ones(2, 3)))


def test_zero_grad_while_gradients_are_being_reduced(hvd: ModuleType, settings: Callable[..., None]) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank reduces nothing")
    settings(overlap="thread")
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model))
    batch = torch.ones(2, 7), torch.ones(2, 3)
    plain_step(model, optimizer, batch)
    loss_of(model, batch).backward()
    with pytest.raises(RuntimeError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def test_newest_optimizer_over_a_model_wins(hvd: ModuleType, settings: Callable[..., None]) -> None:
    """As in a cell that is run again: the old optimizer is still there when the new one is made."""
    settings(overlap="thread")
    model = make_model()
    old = hvd.DistributedOptimizer(momentum(model))
    batch = torch.ones(2, 7), torch.ones(2, 3)
    plain_step(model, old, batch)
    new = hvd.DistributedOptimizer(momentum(model))
    for _ in range(3):
        plain_step(model, new, batch)
    again = hvd.DistributedOptimizer(new)
    plain_step(model, again, batch)
    assert type(again).__mro__[1:] == type(new).__mro__[1:]
    for left in (old, new):
        with pytest.raises(RuntimeError, match="newer DistributedOptimizer"):
            left.step()


def test_optimizers_leave_nothing_behind(hvd: ModuleType) -> None:
    model = make_model()
    batch = torch.ones(2, 7), torch.ones(2, 3)
    gone = []
    for _ in range(50):
        optimizer = hvd.DistributedOptimizer(momentum(model))
        plain_step(model, optimizer, batch)
        gone.append(weakref.ref(optimizer))
    del optimizer
    gc.collect()
    assert not any(reference() for reference in gone)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_needs_init(hvd: ModuleType) -> None:
    hvd.shutdown()
    with pytest.raises(ValueError, match="init"):
        hvd.DistributedOptimizer(momentum(make_model()))
    hvd.init()


def test_goes_on_in_another_epoch(hvd: ModuleType) -> None:
    """As in a notebook: one cell builds the optimizer, the next ones train with it."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model))
    for _ in range(3):
        plain_step(model, optimizer, (torch.full((2, 7), float(hvd.rank())), torch.ones(2, 3)))
        hvd.shutdown()
        hvd.init()
    hvd.check(model, optimizer)


def test_memory_is_flat_over_many_optimizers(hvd: ModuleType) -> None:
    def rounds(count: int) -> None:
        for _ in range(count):
            model = nn.Linear(500, 500)  # 1 MB of gradients
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 500)).sum().backward()
                optimizer.step()
        gc.collect()

    process = psutil.Process()
    rounds(10)
    before = process.memory_info().rss, process.num_fds(), process.num_threads()
    rounds(60)
    after = process.memory_info().rss, process.num_fds(), process.num_threads()
    assert after[0] - before[0] < 16 << 20
    assert after[1:] == before[1:]
