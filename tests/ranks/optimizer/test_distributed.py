"""Data-parallel training equals a single process on the joined batch, for every optimizer and way to use it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranks.joint_training import Build, Net, assert_trains_alike, loss_of, make_model, momentum, plain_step

Batch = tuple[Tensor, Tensor]

BUILDS: dict[str, Build] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": momentum,
    "nesterov": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
}


@pytest.fixture(params=["inline", "thread"])
def overlap(request: pytest.FixtureRequest, settings: Callable[..., None]) -> str:
    """Both ways to reduce, over several buckets."""
    settings(overlap=request.param, fusion_threshold=256)
    return str(request.param)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("name", BUILDS)
def test_every_optimizer(hvd: ModuleType, name: str) -> None:
    assert_trains_alike(hvd, build=BUILDS[name])


@pytest.mark.slow  # `make test` runs test_zero_grad_while_gradients_are_being_reduced
@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero", ["optimizer", "model", "after"])
def test_every_way_to_zero_gradients(hvd: ModuleType, zero: str, set_to_none: bool) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        if zero != "after":
            (model if zero == "model" else optimizer).zero_grad(set_to_none=set_to_none)
        loss_of(model, batch).backward()
        optimizer.step()
        if zero == "after":
            optimizer.zero_grad(set_to_none=set_to_none)

    assert_trains_alike(hvd, step)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("how", ["passes", "set_passes", "no_sync"])
def test_accumulation_over_four_backward_passes(hvd: ModuleType, how: str) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        distributed = hasattr(optimizer, "no_sync")
        if distributed and how == "set_passes":
            optimizer.set_backward_passes_per_step(4)
            assert optimizer.backward_passes_per_step == 4
        for part in range(4):
            last = part == 3
            with optimizer.no_sync() if distributed and how == "no_sync" and not last else contextlib.nullcontext():
                (loss_of(model, batch) / (part + 1)).backward()
        optimizer.step()

    assert_trains_alike(hvd, step, backward_passes_per_step=4 if how == "passes" else 1)


@pytest.mark.slow  # `make test` runs test_accumulation_over_four_backward_passes
@pytest.mark.usefixtures("overlap")
def test_second_backward_before_step_adds_up(hvd: ModuleType) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        loss_of(model, batch).backward()
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


@pytest.mark.slow  # `make test` runs test_parameter_without_gradient_on_some_or_all_ranks
@pytest.mark.usefixtures("overlap")
def test_layer_frozen_and_unfrozen(hvd: ModuleType) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        count = getattr(model, "count", 0)
        model.count = count + 1
        model.first.requires_grad_(not 5 <= count < 12)
        plain_step(model, optimizer, batch)

    assert_trains_alike(hvd, step)


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


@pytest.mark.slow  # `make test` runs test_prepare_of_two_models_that_train_each_other
@pytest.mark.usefixtures("overlap")
def test_two_optimizers_over_two_models(hvd: ModuleType) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Net(), Net()

    class Both:
        """Two optimizers that step one after the other, wrapped by the test where it runs on ranks."""

        def __init__(self, model: Any, wrap: Callable[[Any], Any]) -> None:
            self.optimizers = [wrap(momentum(model.a)), wrap(BUILDS["adam"](model.b))]

    def train(model: Any, wrap: Callable[[Any], Any], rank: int | None) -> nn.Module:
        from ranks.joint_training import joint_batches, share

        both = Both(model, wrap)
        for joint in joint_batches(hvd.size()):
            batch = joint if rank is None else share(joint, rank)
            for optimizer in both.optimizers:
                optimizer.zero_grad()
            loss = loss_of(model.a, batch) + loss_of(model.b, (batch[0], model.a(batch[0])))
            loss.backward()
            for optimizer in both.optimizers:
                optimizer.step()
        return model

    torch.manual_seed(0)
    alone = train(Pair(), lambda optimizer: optimizer, None)
    torch.manual_seed(0)
    together = train(Pair(), hvd.DistributedOptimizer, hvd.rank())
    for mine, theirs in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # `make test` runs those of training/test_schedules.py
@pytest.mark.parametrize("when", ["before", "after"])
def test_learning_rate_scheduler(hvd: ModuleType, when: str) -> None:
    from ranks.joint_training import joint_batches, share

    def train(rank: int | None) -> nn.Module:
        model = make_model()
        optimizer = momentum(model)
        if when == "before":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        if rank is not None:
            optimizer = hvd.DistributedOptimizer(optimizer)
        if when == "after":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        for joint in joint_batches(hvd.size()):
            plain_step(model, optimizer, joint if rank is None else share(joint, rank))
            scheduler.step()
        return model

    for mine, theirs in zip(train(hvd.rank()).parameters(), train(None).parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_module(hvd: ModuleType, reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x))
            out: Tensor = checkpoint(self.second, hidden, use_reentrant=reentrant)
            return out

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Checkpointed()

    assert_trains_alike(hvd, make=make)


@pytest.mark.slow
@pytest.mark.sizes(2)  # to compile takes seconds
@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # of torch on Python 3.13.0
def test_compiled_module(hvd: ModuleType) -> None:
    def make() -> nn.Module:
        model: Any = torch.compile(make_model(), backend="aot_eager")
        return model  # type: ignore[no-any-return]

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


@pytest.mark.slow  # `make test` runs test_gradients_within_a_closure
def test_closure_is_synchronised_wherever_the_optimizer_calls_it(hvd: ModuleType) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)

    def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")

    # In float64: a line search makes much of a rounding error.
    assert_trains_alike(hvd, step, build=lbfgs, make=lambda: make_model().double())
    assert_trains_alike(hvd, step)
