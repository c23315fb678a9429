"""Gradients through every differentiable collective, also inside a process set, and SyncBatchNorm built on them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks.values import randn


@pytest.fixture(params=["all", "evens"])
def group(request: pytest.FixtureRequest, hvd: ModuleType) -> Any:
    """All ranks, or every second one; the others have nothing to do."""
    if request.param == "all":
        return hvd.global_process_set
    evens = hvd.add_process_set(range(0, hvd.size(), 2))
    if not evens.included():
        pytest.skip("not in the process set")
    return evens


def grad(group: Any, index: int, rows: int = 4) -> Tensor:
    """The gradient that member ``index`` gets for its output."""
    return (torch.arange(rows * 3.0).view(rows, 3) + 1) * (index + 1)


def members(group: Any) -> range:
    return range(group.size())


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_allreduce(hvd: ModuleType, group: Any, op: str) -> None:
    divisor = group.size() if op == "Average" else 1
    expected = sum(grad(group, i) for i in members(group)) * 6.0 / divisor
    for form in ("one", "group"):
        x = torch.ones(4, 3, requires_grad=True)
        options = {"op": getattr(hvd, op), "prescale_factor": 2.0, "postscale_factor": 3.0, "process_set": group}
        if form == "one":
            y = hvd.allreduce(x, **options)
        else:
            y, other = hvd.grouped_allreduce([x, torch.ones(2)], **options)
            assert not other.isnan().any()
        y.backward(grad(group, group.rank()))
        torch.testing.assert_close(x.grad, expected)


def test_reductions_without_a_gradient_say_so(hvd: ModuleType) -> None:
    for function in (hvd.allreduce, hvd.reducescatter):
        x = torch.ones(4, 3, requires_grad=True)
        with pytest.raises(RuntimeError, match="op=Max has no gradient"):
            function(x, op=hvd.Max).sum().backward()


def test_second_derivative_of_allreduce(hvd: ModuleType) -> None:
    x = torch.full((2,), 3.0, requires_grad=True)
    y = hvd.allreduce(x, op=hvd.Sum)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    first.sum().backward()
    size = hvd.size()
    # y = p x and the gradient is summed over p ranks: p * 3 y^2, and then p * p * 6 y.
    torch.testing.assert_close(first.detach(), torch.full((2,), size * 3 * (3.0 * size) ** 2))
    torch.testing.assert_close(x.grad, torch.full((2,), size * size * 6 * 3.0 * size))


def test_allgather_averages_what_the_ranks_say(hvd: ModuleType, group: Any) -> None:
    rows = [i + 1 for i in members(group)]
    x = torch.ones(rows[group.rank()], 3, requires_grad=True)
    hvd.allgather(x, process_set=group).backward(grad(group, group.rank(), sum(rows)))
    average = sum(grad(group, i, sum(rows)) for i in members(group)) / group.size()
    start = sum(rows[: group.rank()])
    torch.testing.assert_close(x.grad, average[start : start + rows[group.rank()]])
    scalar = torch.tensor(1.0, requires_grad=True)
    hvd.grouped_allgather([scalar], process_set=group)[0].backward(torch.arange(1.0, group.size() + 1))
    torch.testing.assert_close(scalar.grad, torch.tensor(group.rank() + 1.0))


def test_broadcast_gives_the_average_to_the_root(hvd: ModuleType, group: Any) -> None:
    root = group.ranks[-1]
    x = torch.ones(4, 3, requires_grad=True)
    hvd.broadcast(x, root, process_set=group).backward(grad(group, group.rank()))
    average = sum(grad(group, i) for i in members(group)) / group.size()
    torch.testing.assert_close(x.grad, average if hvd.rank() == root else torch.zeros(4, 3))


@pytest.mark.parametrize("with_splits", [True, False])
def test_alltoall_sends_gradients_back(hvd: ModuleType, group: Any, with_splits: bool) -> None:
    size = group.size()
    splits = [i + 1 for i in members(group)] if with_splits else [2] * size
    x = torch.ones(sum(splits), 2, requires_grad=True)
    result = hvd.alltoall(x, splits=splits if with_splits else None, process_set=group)
    y = result[0] if with_splits else result
    # Every member weighs what it received by its own index.
    (y * (group.rank() + 1)).sum().backward()
    torch.testing.assert_close(x.grad, torch.cat([torch.full((splits[i], 2), i + 1.0) for i in members(group)]))


@pytest.mark.parametrize("op", ["Sum", "Average"])
@pytest.mark.parametrize("grouped", [False, True])
def test_gather_after_scatter_has_the_gradient_of_allreduce(
    hvd: ModuleType, group: Any, op: str, grouped: bool
) -> None:
    options = {"op": getattr(hvd, op), "process_set": group, "prescale_factor": 0.5, "postscale_factor": 4.0}
    x, z = torch.ones(4, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    part = hvd.grouped_reducescatter([x], **options)[0] if grouped else hvd.reducescatter(x, **options)
    hvd.allgather(part, process_set=group).backward(grad(group, group.rank()))
    hvd.allreduce(z, **options).backward(grad(group, group.rank()))
    torch.testing.assert_close(x.grad, z.grad)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compression_passes_gradients(hvd: ModuleType, compression: str) -> None:
    x = torch.ones(4, 3, requires_grad=True)
    hvd.allreduce(x, compression=getattr(hvd.Compression, compression)).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(4, 3))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shape", [(5,), (5, 4), (5, 2, 3)], ids=str)
def test_sync_batch_norm_equals_batch_norm_of_the_joined_batch(
    hvd: ModuleType, shape: tuple[int, ...], momentum: float | None
) -> None:
    """Values, gradients, parameters' gradients and running statistics, with another number of samples on each rank."""
    counts = [3 + r for r in range(hvd.size())]
    kinds = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d}
    alone = kinds[len(shape)](5, momentum=momentum, dtype=torch.float64)
    synced = hvd.SyncBatchNorm(5, momentum=momentum).double()
    for module in (alone, synced):
        nn.init.constant_(module.weight, 1.5)
        nn.init.constant_(module.bias, 0.5)
    generator = torch.Generator().manual_seed(0)
    own = slice(sum(counts[: hvd.rank()]), sum(counts[: hvd.rank() + 1]))
    for _ in range(3):
        joint = randn(generator, sum(counts), *shape, dtype=torch.float64) * 3 + 100
        weights = randn(generator, *joint.shape, dtype=torch.float64)
        x, mine = joint.clone().requires_grad_(), joint[own].clone().requires_grad_()
        alone.zero_grad()
        synced.zero_grad()
        y, z = alone(x), synced(mine)
        torch.testing.assert_close(z, y[own])
        (y * weights).sum().backward()
        (z * weights[own]).sum().backward()
        torch.testing.assert_close(mine.grad, x.grad[own])
        hvd.grouped_allreduce_([p.grad for p in synced.parameters()], op=hvd.Sum)
        for a, b in zip(synced.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(dict(synced.named_buffers())[name], buffer)
    alone.eval()
    synced.eval()
    torch.testing.assert_close(synced(joint), alone(joint))


def test_sync_batch_norm_options_and_wrong_input(hvd: ModuleType) -> None:
    plain = hvd.SyncBatchNorm(4, affine=False, track_running_stats=False)
    assert plain.weight is None
    assert plain.running_mean is None
    half = plain(torch.randn(6, 4).to(torch.bfloat16))
    assert half.dtype is torch.bfloat16
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        plain(torch.ones(3))
