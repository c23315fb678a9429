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


def newest_knob(name: str) -> Any:
    """A run keeps those of earlier tests."""
    return [one for key, one in steering.knobs.items() if key.startswith(name)][-1]


@pytest.mark.sizes(1)
@pytest.mark.parametrize("visits", [(), (0.0,)], ids=["directly", "after a visit to 0"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_knob_in_the_middle(name: str, visits: tuple[float, ...]) -> None:
    _, plain, schedule = made(SCHEDULES[name])
    before = rates(plain, schedule, 4)
    after = [rate * 3 for rate in rates(plain, schedule, STEPS - 4)]
    _, optimizer, schedule = ring.prepare(*made(SCHEDULES[name]))
    assert rates(optimizer, schedule, 4) == pytest.approx(before)
    for value in (*visits, 3 * float(optimizer.param_groups[0]["lr"])):
        newest_knob("lr").take(value)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(value)
    assert rates(optimizer, schedule, STEPS - 4) == pytest.approx(after)


@pytest.mark.sizes(1)
@pytest.mark.parametrize("kept", [False, True], ids=["here", "in another process"])
def test_groups_keep_their_proportions_when_a_knob_visits_0(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"lr": (0.1, 0.02), "weight_decay": (0.0, 0.01), "momentum": (0.9, 0.45)}

    def two_groups() -> tuple[Any, Any]:
        weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        groups = [{"params": [w], **{key: of[i] for key, of in options.items()}} for i, w in enumerate(weights)]
        optimizer = torch.optim.SGD(groups)
        return ring.prepare(optimizer, schedules.CosineAnnealingLR(optimizer, 100, eta_min=0.001))  # type: ignore[no-any-return]

    optimizer, schedule = two_groups()
    for key in options:
        newest_knob(key).take(0.0)
        newest_knob(key).take(0.0)
    monkeypatch.setattr(steering, "run", "the next cell")
    assert rates(optimizer, schedule, 2) == [0.0, 0.0]
    assert {newest_knob(key).made_in for key in options} == {"the next cell"}
    assert [group[key] for group in optimizer.param_groups for key in options] == [0.0] * 6
    if kept:
        states = optimizer.state_dict(), schedule.state_dict()
        optimizer, schedule = two_groups()
        optimizer.load_state_dict(states[0])
        schedule.load_state_dict(states[1])
    for key, of in options.items():
        newest_knob(key).take(next(filter(None, of)) / 2)
        assert [group[key] for group in optimizer.param_groups] == pytest.approx([value / 2 for value in of])
    assert schedule.base_lrs == pytest.approx([0.05, 0.01])
    assert schedule.eta_min == pytest.approx(0.0005)
    newest_knob("weight_decay").take(0.0)
    optimizer.param_groups[0]["weight_decay"] = 0.5  # by hand: the newest proportions count
    newest_knob("weight_decay").take(0.25)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
