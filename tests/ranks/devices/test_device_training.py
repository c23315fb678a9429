"""Training on a device: the ranks' gradients are those of one large batch, and the host never waits within a step."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from harness.devices.pretended_gpu import PretendedGpu
from ring_notebook.torch.optimizer import bucket as bucket_module
from ring_notebook.torch.optimizer.bucket import Packer

pytestmark = pytest.mark.sizes(2, slow=(1, 3))


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(rank: int, count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(8, 6, generator=draw), torch.randn(8, 3, generator=draw)) for _ in range(count)]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[tuple[torch.Tensor, torch.Tensor]],
    before_step: Callable[[], Any] = lambda: None,
) -> list[torch.Tensor]:
    device = next(model.parameters()).device
    moved = [(x.to(device), y.to(device)) for x, y in data]
    for x, y in moved:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        before_step()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def expected(size: int, lr: float = 0.1) -> list[torch.Tensor]:
    """What one process gets from the batches of all ranks."""
    model = network()
    each = [batches(rank) for rank in range(size)]
    whole = [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in zip(*each, strict=True)]
    return train(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), whole)  # type: ignore[arg-type]


def distributed(hvd: ModuleType, device: torch.device, **options: Any) -> tuple[nn.Module, Any]:
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


@pytest.mark.parametrize("small", [0, 200, bucket_module.SMALL], ids=["in place", "some packed", "all packed"])
@pytest.mark.parametrize("overlap", ["thread", "inline"])
def test_ranks_train_as_one_process(
    hvd: ModuleType,
    rank: int,
    size: int,
    device: torch.device,
    small: int,
    overlap: str,
    settings: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings(overlap=overlap, fusion_threshold=1000)  # several buckets
    monkeypatch.setattr(bucket_module, "SMALL", small)
    model, optimizer = distributed(hvd, device)
    for got, want in zip(train(model, optimizer, batches(rank)), expected(size), strict=True):
        torch.testing.assert_close(got, want)


def test_the_host_waits_for_nothing_within_a_step(
    hvd: ModuleType, rank: int, device: torch.device, gpu: PretendedGpu
) -> None:
    model, optimizer = distributed(hvd, device)
    data = [(x.to(device), y.to(device)) for x, y in batches(rank)]
    gpu.waits.clear()
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        hvd.log(loss=loss)
    assert gpu.waits == []


@pytest.mark.sizes(2)
@pytest.mark.parametrize("overlap", ["thread", "inline"])
@pytest.mark.parametrize(
    "way", ["clipped by ours", "compressed", "predivided", "in groups", "accumulated", "of a process set"]
)
def test_no_option_makes_the_host_wait(
    hvd: ModuleType,
    rank: int,
    device: torch.device,
    gpu: PretendedGpu,
    way: str,
    overlap: str,
    settings: Callable[..., None],
) -> None:
    settings(overlap=overlap, fusion_threshold=1000)
    options: dict[str, Any] = {
        "compressed": {"compression": hvd.Compression.fp16},
        "predivided": {"gradient_predivide_factor": 2.0},
        "in groups": {"num_groups": 2},
        "accumulated": {"backward_passes_per_step": 2},
        "of a process set": {"process_set": hvd.add_process_set([0, 1])},
    }.get(way, {})
    model, optimizer = distributed(hvd, device, **options)
    data = [(x.to(device), y.to(device)) for x, y in batches(rank, 4)]
    gpu.waits.clear()
    for step, (x, y) in enumerate(data):
        if way != "accumulated" or step % 2 == 0:
            optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if way == "clipped by ours":
            hvd.clip_grad_norm_(model.parameters(), 1.0)
        if way != "accumulated" or step % 2:
            optimizer.step()
    assert gpu.waits == []


@pytest.mark.sizes(2)
def test_a_step_with_a_scaler_reads_once(hvd: ModuleType, rank: int, device: torch.device, gpu: PretendedGpu) -> None:
    model, optimizer = distributed(hvd, device)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    for x, y in [(x.to(device), y.to(device)) for x, y in batches(rank)]:
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        gpu.waits.clear()
        scaler.step(optimizer)
        scaler.update()
        assert len(gpu.waits) == 1, gpu.waits


def test_a_graph_of_backward_is_captured_within_no_sync(
    hvd: ModuleType, rank: int, size: int, device: torch.device, gpu: PretendedGpu
) -> None:
    model, optimizer = distributed(hvd, device)
    for x, y in [(x.to(device), y.to(device)) for x, y in batches(rank)]:
        optimizer.zero_grad()
        with gpu.capture(), optimizer.no_sync():
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    for got, want in zip(model.parameters(), expected(size), strict=True):
        torch.testing.assert_close(got.detach().cpu(), want)


def test_buckets_start_during_backward(
    hvd: ModuleType,
    rank: int,
    size: int,
    device: torch.device,
    settings: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[bool] = []
    start = bucket_module.Bucket.start
    monkeypatch.setattr(
        bucket_module.Bucket, "start", lambda one, *, blocking: (begun.append(blocking), start(one, blocking=blocking))
    )
    settings(fusion_threshold=1000)
    model, optimizer = distributed(hvd, device)
    x, y = (tensor.to(device) for tensor in batches(rank)[0])
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()  # settles the plan
    optimizer.zero_grad()
    begun.clear()
    nn.functional.mse_loss(model(x), y).backward()
    assert (False in begun) is (size > 1)
    optimizer.step()


def test_a_gradient_that_no_rank_has_stays_none(hvd: ModuleType, rank: int, size: int, device: torch.device) -> None:
    first, second, third = (nn.Parameter(torch.ones(4, device=device)) for _ in range(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second, third], lr=1.0))
    for _ in range(2):
        optimizer.zero_grad()
        (first.sum() + (second.sum() if rank == 0 else 0)).backward()
        optimizer.step()
    assert first.tolist() == [-1.0] * 4
    assert second.tolist() == pytest.approx([1.0 - 2 / size] * 4)
    assert third.grad is None


@pytest.mark.sizes(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all(hvd: ModuleType, rank: int, device: torch.device) -> None:
    w = nn.Parameter(torch.ones(3, device=device))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0))
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    for factor in (float("inf") if rank else 1.0, 2.0):
        optimizer.zero_grad()
        scaler.scale((w * factor).sum()).backward()
        before = w.detach().cpu()
        scaler.step(optimizer)
        scaler.update()
        step = (before - w.detach().cpu()).tolist()
        assert step == ([0.0] * 3 if factor != 2.0 else [2.0] * 3)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_over_all_ranks(
    hvd: ModuleType, rank: int, size: int, device: torch.device, gpu: PretendedGpu, momentum: float | None
) -> None:
    everything = torch.randn(4 * size, 5, generator=torch.Generator().manual_seed(1))
    norm = hvd.SyncBatchNorm(5, momentum=momentum).to(device)
    reference = nn.BatchNorm1d(5, momentum=momentum)
    here = everything[4 * rank : 4 * rank + 4].to(device)
    gpu.waits.clear()
    normal = norm(here)
    if size > 1:
        assert gpu.waits == []
    torch.testing.assert_close(normal.cpu(), reference(everything)[4 * rank : 4 * rank + 4])
    torch.testing.assert_close(norm.running_var.cpu(), reference.running_var)


def test_a_packer_keeps_its_memory_and_follows_new_shapes(device: torch.device) -> None:
    packer = Packer()
    small = [torch.full((count,), float(count), device=device) for count in (3, 4, 5)]
    (flat,) = packer.pack(small)
    assert flat.tolist() == [3.0] * 3 + [4.0] * 4 + [5.0] * 5
    flat.mul_(2)
    packer.unpack()
    assert [tensor[0].item() for tensor in small] == [6.0, 8.0, 10.0]
    assert packer.pack(small)[0] is flat
    packer.unpack()
    (longer,) = packer.pack([*small, torch.ones(2, 2, device=device)])
    assert longer.numel() == 16
    on_host = [torch.ones(2), torch.ones(3)]
    assert packer.pack(on_host) == on_host


@pytest.mark.sizes(2)
def test_training_where_the_device_is_the_default_one(
    hvd: ModuleType, rank: int, device: torch.device, gpu: PretendedGpu
) -> None:
    """What this package makes for the host stays there, and nobody waits for it."""
    torch.set_default_device(device)
    try:
        model = nn.Linear(3, 2, bias=False)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        before = model.weight.detach().clone()
        gpu.waits.clear()
        model(torch.full((1, 3), float(rank + 1))).sum().backward()
        optimizer.step()
        assert gpu.waits == []
        hvd.check(model, optimizer)
        assert (before - model.weight).detach().cpu().tolist() == [[1.5] * 3] * 2
    finally:
        torch.set_default_device(None)
