"""Rates that schedules keep are scaled with those of their optimizer, by `scale_lr` and by knobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

import ring_notebook.torch as ring
from ring_notebook.core.steering import steering

STEPS = 12
Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULES: dict[str, Make] = {
    "step": lambda o: schedules.StepLR(o, 3, gamma=0.5),
    "cyclic": lambda o: schedules.CyclicLR(o, base_lr=0.1, max_lr=0.4, step_size_up=3, cycle_momentum=False),
    "one cycle": lambda o: schedules.OneCycleLR(o, max_lr=0.4, total_steps=STEPS + 1, cycle_momentum=False),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 5, eta_min=0.02),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 4, eta_min=0.02),
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "polynomial": lambda o: schedules.PolynomialLR(o, STEPS),
    "linear": lambda o: schedules.LinearLR(o, 0.1, total_iters=5),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0, factor=0.3, min_lr=0.02),
    "sequence": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o, 0.5, 3), schedules.CosineAnnealingLR(o, 6, eta_min=0.02)], [3]
    ),
    "chain": lambda o: schedules.ChainedScheduler([schedules.StepLR(o, 4, gamma=0.5), schedules.ExponentialLR(o, 0.9)]),
    "swa": lambda o: SWALR(o, swa_lr=0.02, anneal_epochs=4),
}


@pytest.fixture(autouse=True)
def generation() -> Iterator[None]:
    ring.init()
    yield
    ring.shutdown()


def made(schedule: Make) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, schedule(optimizer)


def rates(optimizer: Any, schedule: Any, steps: int = STEPS) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.step()
        schedule.step(*([1.0] if isinstance(schedule, schedules.ReduceLROnPlateau) else []))
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_scale_lr(name: str, size: int) -> None:
    expected = [rate * size for rate in rates(*made(SCHEDULES[name])[1:])]
    _, optimizer, schedule = ring.prepare(*made(SCHEDULES[name]), scale_lr=True)
    assert rates(optimizer, schedule) == pytest.approx(expected)


@pytest.mark.sizes(1)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_knob_in_the_middle(name: str) -> None:
    _, plain, schedule = made(SCHEDULES[name])
    before = rates(plain, schedule, 4)
    after = [rate * 3 for rate in rates(plain, schedule, STEPS - 4)]
    _, optimizer, schedule = ring.prepare(*made(SCHEDULES[name]))
    assert rates(optimizer, schedule, 4) == pytest.approx(before)
    knob = [one for key, one in steering.knobs.items() if key.startswith("lr")][-1]
    knob._apply(3 * float(optimizer.param_groups[0]["lr"]))
    assert rates(optimizer, schedule, STEPS - 4) == pytest.approx(after)
