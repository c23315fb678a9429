"""Data-parallel training equals a single process on the joined batch.

`ranks.loops` has ways to zero gradients, to freeze, to schedule, to add passes and to checkpoint, closures, and several
optimizers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks.joint_training import Net, assert_trains_alike, loss_of, make_model, momentum

Batch = tuple[Tensor, Tensor]


@pytest.fixture(params=["inline", "thread"])
def overlap(request: pytest.FixtureRequest, settings: Callable[..., None]) -> str:
    """Both ways to reduce, over several buckets."""
    settings(overlap=request.param, fusion_threshold=256)
    return str(request.param)


@pytest.mark.usefixtures("overlap")
def test_the_passes_of_a_step_can_be_changed(hvd: ModuleType) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        if hasattr(optimizer, "set_backward_passes_per_step"):
            optimizer.set_backward_passes_per_step(4)
            assert optimizer.backward_passes_per_step == 4
        for part in range(4):
            (loss_of(model, batch) / (part + 1)).backward()
        optimizer.step()

    assert_trains_alike(hvd, step)


@pytest.mark.usefixtures("overlap")
def test_clipping_between_synchronize_and_step(hvd: ModuleType) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        distributed = hasattr(optimizer, "synchronize")
        if distributed:
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize() if distributed else contextlib.nullcontext():
            optimizer.step()

    assert_trains_alike(hvd, step)


def test_step_after_synchronize_without_skip_warns_once(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model))
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    optimizer.synchronize()
    optimizer.step()  # pytest turns a second warning into an error


@pytest.mark.usefixtures("overlap")
def test_parameter_without_gradient_on_some_or_all_ranks(hvd: ModuleType) -> None:
    """A layer that only rank 0 uses, and not always: in a single process its samples alone use it."""
    size = hvd.size()

    class Branching(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(7, 3)
            self.never = nn.Linear(2, 2)
            self.count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            out = super().forward(x)
            if self.count % 3 == 0:  # nobody uses it in this step
                return out
            if len(x) > 6 or size == 1:  # alone: the samples that are rank 0's
                return out + torch.cat([self.extra(x[:6]), out.new_zeros(len(x) - 6, 3)])
            return out + self.extra(x) if hvd.rank() == 0 else out

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Branching()

    assert_trains_alike(hvd, make=make)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused by torch"])
@pytest.mark.parametrize("recipe", ["horovod's", "unscaled", "plain"])
def test_grad_scaler_skips_the_same_step_on_all_ranks(hvd: ModuleType, recipe: str, fused: bool) -> None:
    """Gradients that overflow on one rank are an overflow on all, as they are in the joined batch."""
    scalers: dict[int, torch.amp.GradScaler] = {}

    def step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        device = torch.get_default_device().type
        scaler = scalers.setdefault(id(model), torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=4))
        count = model.count = getattr(model, "count", 0) + 1
        optimizer.zero_grad()
        distributed = hasattr(optimizer, "synchronize")
        loss = loss_of(model, batch)
        if count == 7 and (not distributed or hvd.rank() == 0):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        reduced = distributed and recipe == "horovod's"
        if reduced:
            optimizer.synchronize()
        if recipe != "plain":
            scaler.unscale_(optimizer)
        with optimizer.skip_synchronize() if reduced else contextlib.nullcontext():
            scaler.step(optimizer)
        scaler.update()

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)

    assert_trains_alike(hvd, step, build=build)
    assert len({scaler.get_scale() for scaler in scalers.values()}) == 1
