"""The options of DistributedOptimizer, right and wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks.joint_training import assert_trains_alike, make_model, momentum, plain_step


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


def test_compression_of_gradients_is_refused_where_none_travel(hvd: ModuleType) -> None:
    for chosen in (hvd.Compression.int8, hvd.Compression.auto, hvd.Compression.powersgd(2)):
        with pytest.raises(ValueError, match=r"op=Adasum combines steps, not gradients, so it takes no Compression\."):
            hvd.DistributedOptimizer(momentum(make_model()), op=hvd.Adasum, compression=chosen)
        with pytest.raises(TypeError, match="is for gradients"):
            hvd.allreduce(torch.ones(3), compression=chosen)
        if chosen is not hvd.Compression.int8:
            with pytest.raises(ValueError, match="is for gradients, and sync_every reduces none"):
                hvd.DistributedOptimizer(momentum(make_model()), sync_every=5, compression=chosen)
    with pytest.raises(TypeError, match="compression must be"):
        hvd.DistributedOptimizer(momentum(make_model()), compression=hvd.Compression.powersgd)


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


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_a_gradient_that_turns_out_to_be_sparse(hvd: ModuleType, sparse_as_dense: bool) -> None:
    """A table that no rank has used in the first step: nobody could know then that its gradient is sparse."""
    torch.manual_seed(0)
    first, later = nn.Embedding(10, 4, sparse=True), nn.Embedding(10, 4, sparse=True)
    parameters = [*first.parameters(), *later.parameters()]
    kind = torch.optim.SGD if sparse_as_dense else torch.optim.SparseAdam  # which refuses dense ones
    optimizer = hvd.DistributedOptimizer(kind(parameters, lr=0.1), sparse_as_dense=sparse_as_dense)
    rows = torch.tensor([hvd.rank(), 9])
    for step in range(4):
        optimizer.zero_grad()
        tables = [first, later] if step and (step > 1 or hvd.rank() == 0) else [first]
        torch.stack([table(rows).sum() for table in tables]).sum().backward()
        optimizer.synchronize()
        for table in tables if hvd.rank() else (first, later)[: 1 + bool(step)]:
            grad = table.weight.grad
            assert grad is not None
            assert grad.is_sparse != (sparse_as_dense and hvd.size() > 1)
            users = 1 / hvd.size() if step == 1 and table is later else 1.0
            torch.testing.assert_close(grad.to_dense()[9], torch.full((4,), users))
        with optimizer.skip_synchronize():
            optimizer.step()


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


@pytest.mark.sizes(1, 2, slow=(4,))  # Adasum is defined for powers of two
def test_adasum_of_parallel_steps_is_one_step_and_of_orthogonal_steps_their_sum(hvd: ModuleType) -> None:
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


@pytest.mark.sizes(1, 2, slow=(4,))  # Adasum is defined for powers of two
def test_adasum_with_a_grad_scaler(hvd: ModuleType) -> None:
    """Scales of the ranks' own make the same step, and an overflow on one rank is one on all."""
    w = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), op=hvd.Adasum)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=8.0 * (hvd.rank() + 1))
    for overflow in (False, True, False):
        optimizer.zero_grad()
        scaler.scale(w.sum() * (float("inf") if overflow and hvd.rank() == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(w.detach(), torch.full((3,), -2.0))


def test_names_that_are_doubled_missing_or_no_pairs(hvd: ModuleType) -> None:
    model = make_model()
    named = list(model.named_parameters())
    doubled = [("first.weight", p) for _, p in named]
    for bad, match in (
        (doubled, "duplicate names: first.weight"),
        (named[1:], r"lacks .*group 0 parameter 0 of shape \(13, 7\)"),
        ([p for _, p in named], "pairs"),
    ):
        with pytest.raises(ValueError, match=match):
            hvd.DistributedOptimizer(momentum(model), named_parameters=bad)


def test_different_models_are_named(hvd: ModuleType) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank agrees with itself")
    model = nn.Linear(3 + (hvd.rank() == 1), 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    with pytest.raises(
        RuntimeError, match=r"'weight' \(2, 3\) float32 on rank 0 and 'weight' \(2, 4\) float32 on rank 1"
    ):
        plain_step(model, optimizer, (torch.ones(1, model.in_features), torch.ones(1, 2)))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_different_thresholds_are_named(hvd: ModuleType, settings: Callable[..., None]) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank agrees with itself")
    settings(fusion_threshold=100 + hvd.rank())
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model))
    with pytest.raises(RuntimeError, match="RING_FUSION_THRESHOLD"):
        plain_step(model, optimizer, (torch.ones(2, 7), torch.ones(2, 3)))


def test_a_table_that_one_rank_uses_is_sparse_from_the_first_step_on(hvd: ModuleType) -> None:
    table = nn.Embedding(10, 4, sparse=True)
    nn.init.ones_(table.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SparseAdam(table.parameters(), lr=0.1), named_parameters=table.named_parameters()
    )
    for _ in range(2):
        optimizer.zero_grad()
        if hvd.rank() == hvd.size() - 1:
            table(torch.tensor([3])).sum().backward()
        optimizer.step()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        assert table.weight.grad.coalesce().indices().tolist() == [[3]]
    assert (table.weight != 1).any(dim=1).nonzero().tolist() == [[3]]


@pytest.mark.parametrize("options", [{}, {"op": 2}], ids=str)
def test_the_names_of_parameters_are_where_libraries_look(hvd: ModuleType, options: dict[str, Any]) -> None:
    model = nn.Linear(2, 1)
    for names in ({"named_parameters": model.named_parameters()}, {}):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **names, **options)
        found = [optimizer._parameter_names[parameter] for parameter in model.parameters()]
        assert found == (["weight", "bias"] if names else ["group 0 parameter 0", "group 0 parameter 1"])
