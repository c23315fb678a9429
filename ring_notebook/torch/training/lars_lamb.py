"""LARS and LAMB: optimizers whose steps are scaled per layer, for very large batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def _checked(**values: float) -> None:
    for name, value in values.items():
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, algorithm 1).

    Per parameter tensor w with gradient g::

        local_lr = trust * |w| / (|g| + weight_decay * |w|)      (1 where a norm is zero)
        v = momentum * v + lr * local_lr * (g + weight_decay * w)
        w = w - v
    """

    momentum_holds_lr = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        _checked(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust)
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step; returns what ``closure`` returns, which is called first to make the gradients."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                decay = group["weight_decay"]
                weight_norm, grad_norm = p.norm(), p.grad.norm()
                local_lr = _ratio(group["trust"] * weight_norm, grad_norm + decay * weight_norm, grad_norm)
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                velocity = state["momentum_buffer"]
                velocity.mul_(group["momentum"]).add_((p.grad + decay * p) * (group["lr"] * local_lr))
                p.sub_(velocity)
        return loss


class LAMB(Optimizer):
    """Layer-wise adaptive moments (You et al. 2020, algorithm 2), with Adam's bias correction.

    Per parameter tensor w with gradient g at step t::

        m = beta1 * m + (1 - beta1) * g,    v = beta2 * v + (1 - beta2) * g²
        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
        w = w - lr * |w| / |r + weight_decay * w| * (r + weight_decay * w)      (ratio 1 where a norm is zero)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        _checked(lr=lr, eps=eps, weight_decay=weight_decay)
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step; returns what ``closure`` returns, which is called first to make the gradients."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(p.grad, 1 - beta1)
                square.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
                update = mean / (1 - beta1 ** state["step"]) / root + group["weight_decay"] * p
                weight_norm, update_norm = p.norm(), update.norm()
                p.sub_(update * (group["lr"] * _ratio(weight_norm, update_norm, update_norm)))
        return loss


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _ratio(numerator: Tensor, denominator: Tensor, norm: Tensor) -> Tensor:
    """``numerator / denominator``, and 1 where the numerator or ``norm`` is zero."""
    return torch.where((numerator > 0) & (norm > 0), numerator / denominator, torch.ones_like(numerator))
