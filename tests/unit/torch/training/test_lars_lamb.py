"""LARS and LAMB against the papers' formulas, one number at a time; the warm-up against its table."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from ring_notebook.torch import LAMB, LARS, LinearScalingLR

START = [3.0, -4.0]  # norm 5
GRADIENTS = [[0.3, 0.4], [-0.6, 0.8], [0.0, 0.1]]


def _norm(vector: list[float]) -> float:
    return math.sqrt(sum(x * x for x in vector))


def _train(optimizer: torch.optim.Optimizer, w: nn.Parameter) -> list[float]:
    for gradient in GRADIENTS:
        w.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return w.tolist()


def _parameter(values: list[float]) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def test_lars_is_algorithm_1() -> None:
    lr, m, decay, trust = 0.5, 0.9, 0.01, 0.02
    w, v = START, [0.0, 0.0]
    for g in GRADIENTS:
        local = trust * _norm(w) / (_norm(g) + decay * _norm(w))
        v = [m * vi + lr * local * (gi + decay * wi) for vi, gi, wi in zip(v, g, w, strict=True)]
        w = [wi - vi for wi, vi in zip(w, v, strict=True)]
    p = _parameter(START)
    optimizer = LARS([p], lr=lr, momentum=m, weight_decay=decay, trust=trust)
    assert _train(optimizer, p) == pytest.approx(w, rel=1e-12)


def test_lamb_is_algorithm_2() -> None:
    lr, (b1, b2), eps, decay = 0.1, (0.9, 0.99), 1e-6, 0.02
    w, m, v = START, [0.0, 0.0], [0.0, 0.0]
    for t, g in enumerate(GRADIENTS, 1):
        m = [b1 * mi + (1 - b1) * gi for mi, gi in zip(m, g, strict=True)]
        v = [b2 * vi + (1 - b2) * gi * gi for vi, gi in zip(v, g, strict=True)]
        r = [mi / (1 - b1**t) / (math.sqrt(vi / (1 - b2**t)) + eps) for mi, vi in zip(m, v, strict=True)]
        u = [ri + decay * wi for ri, wi in zip(r, w, strict=True)]
        w = [wi - lr * _norm(w) / _norm(u) * ui for wi, ui in zip(w, u, strict=True)]
    p = _parameter(START)
    assert _train(LAMB([p], lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay), p) == pytest.approx(w, rel=1e-12)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_layer_of_zeros_takes_a_plain_step(kind: Any) -> None:
    p = _parameter([0.0, 0.0])
    p.grad = torch.tensor([1.0, 0.0], dtype=torch.float64)
    kind([p], lr=0.5).step()
    assert p.tolist() == pytest.approx([-0.5, 0.0], rel=1e-5)
    still = _parameter(START)
    still.grad = torch.zeros(2, dtype=torch.float64)
    kind([still], lr=0.5).step()
    assert still.tolist() == START


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_wrong_options_are_named(kind: Any) -> None:
    with pytest.raises(ValueError, match="lr must not be negative, got -1"):
        kind([_parameter(START)], lr=-1)
    with pytest.raises(ValueError, match="betas"):
        LAMB([_parameter(START)], betas=(0.9, 1.0))


def _rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_warm_up_is_linear_and_stays() -> None:
    optimizer = torch.optim.SGD([_parameter(START)], lr=0.1, momentum=0.9)
    scheduler = LinearScalingLR(optimizer, warmup_steps=4, scale=8)
    assert _rates(optimizer, scheduler, 7) == pytest.approx([0.1, 0.275, 0.45, 0.625, 0.8, 0.8, 0.8])
    assert optimizer.param_groups[0]["momentum"] == 0.9, "torch's SGD keeps the rate out of its momentum"
    at_once = torch.optim.SGD([_parameter(START)], lr=0.1)
    assert _rates(at_once, LinearScalingLR(at_once, 0, scale=2), 2) == pytest.approx([0.2, 0.2])
    with pytest.raises(ValueError, match="warmup_steps must not be negative, got -1"):
        LinearScalingLR(at_once, -1, scale=2)


def test_other_schedules_go_on_beside_the_warm_up() -> None:
    optimizer = torch.optim.SGD([_parameter(START)], lr=0.1)
    warm_up = LinearScalingLR(optimizer, warmup_steps=4, scale=8)
    both = torch.optim.lr_scheduler.ChainedScheduler(
        [warm_up, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 6], gamma=0.1)]
    )
    expected = [0.1, 0.275, 0.045, 0.0625, 0.08, 0.08, 0.008, 0.008]
    assert _rates(optimizer, both, 8) == pytest.approx(expected)


def test_warm_up_restarts_and_goes_back_with_the_optimizer() -> None:
    """A cell that makes the schedule is run again; an older state is loaded into the optimizer alone."""
    optimizer = torch.optim.SGD([_parameter(START)], lr=0.1)
    scheduler = LinearScalingLR(optimizer, warmup_steps=4, scale=8)
    _rates(optimizer, scheduler, 2)
    earlier = copy.deepcopy(optimizer.state_dict())
    _rates(optimizer, scheduler, 1)
    optimizer.load_state_dict(earlier)
    assert _rates(optimizer, scheduler, 3) == pytest.approx([0.45, 0.8, 0.8])
    assert _rates(optimizer, LinearScalingLR(optimizer, warmup_steps=4, scale=8), 2) == pytest.approx([0.1, 0.275])


def test_momentum_correction_makes_both_forms_of_momentum_the_same() -> None:
    """Goyal et al., remark 2: equation 10 with the correction goes where equation 9 goes."""

    class RateInside(torch.optim.Optimizer):
        """v = m v + lr g, w = w - v."""

        momentum_holds_lr = True

        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1, "momentum": 0.9})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    v = self.state[p].setdefault("v", torch.zeros_like(p))
                    v.mul_(group["momentum"]).add_(p.grad, alpha=group["lr"])
                    p.sub_(v)

    inside, outside = _parameter(START), _parameter(START)
    for optimizer, p in ((RateInside([inside]), inside), (torch.optim.SGD([outside], lr=0.1, momentum=0.9), outside)):
        scheduler = LinearScalingLR(optimizer, warmup_steps=3, scale=4)
        for gradient in GRADIENTS * 2:
            p.grad = torch.tensor(gradient, dtype=torch.float64)
            optimizer.step()
            scheduler.step()
    assert inside.tolist() == pytest.approx(outside.tolist(), rel=1e-12)


@pytest.mark.parametrize("again", [False, True], ids=["one schedule", "the cell runs again"])
def test_momentum_correction_follows_a_new_momentum(again: bool) -> None:
    """Of a knob or by hand, at any step."""
    optimizer = LARS([_parameter(START)], lr=0.1, momentum=0.9)
    (group,) = optimizer.param_groups
    scheduler = LinearScalingLR(optimizer, warmup_steps=4, scale=8)
    _rates(optimizer, scheduler, 2)
    assert group["momentum"] == pytest.approx(0.9 * 0.45 / 0.275)
    if again:
        scheduler = LinearScalingLR(optimizer, warmup_steps=4, scale=8)
        _rates(optimizer, scheduler, 2)
        assert group["momentum"] == pytest.approx(0.9 * 0.45 / 0.275)
    group["momentum"] = 0.6
    _rates(optimizer, scheduler, 1)
    assert group["momentum"] == pytest.approx(0.6 * 0.625 / 0.45)
    _rates(optimizer, scheduler, 3)
    assert group["momentum"] == 0.6
