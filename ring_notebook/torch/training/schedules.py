"""Learning rates for large batches: linear scaling with a gradual warm-up (Goyal et al. 2017)."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LRScheduler

from ring_notebook.api.basics import size
from ring_notebook.torch.collectives.tensor_arguments import check_optimizer

_FACTOR = "linear_scaling"
"""Key of a group for the factor in its rate, so that a loaded state has both."""
_CORRECTED = "corrected_momentum"
"""Key of a group for its own momentum and the corrected one; another one there is a new momentum, such as a knob's."""


class LinearScalingLR(LRScheduler):
    """Raise the learning rate from its own value to ``scale`` times that over ``warmup_steps`` steps, then keep it.

    Goyal et al. 2017, section 2: with a batch ``scale`` times as large (by default the present ``size()``, also when an
    elastic training loses ranks) take ``scale`` times the learning rate, but get there gradually. Call ``step()``
    after every optimizer step. It multiplies the present rate by the change of its own factor, so other schedules that
    do the same (``ExponentialLR``, ``MultiStepLR``, ``CosineAnnealingLR``), and changes by hand, keep their effect:
    step both, or put them into a ``ChainedScheduler``. ``SequentialLR`` does not fit: its second schedule starts from
    the unscaled rate.

    ``momentum_correction``: an optimizer whose momentum buffer contains the learning rate (``v = m v + lr g``, as in
    the paper's equation 10 and `LARS`) must scale that buffer with every change of the rate. This scales ``momentum``
    for the step of the change instead. `torch.optim.SGD` keeps the rate out of the buffer (equation 9) and needs no
    correction. By default it is on for optimizers with ``momentum_holds_lr = True``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_steps: int,
        scale: float | None = None,
        momentum_correction: bool | None = None,
        last_epoch: int = -1,
    ) -> None:
        check_optimizer(optimizer, "LinearScalingLR")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {warmup_steps}")
        self.warmup_steps = warmup_steps
        self._scale = None if scale is None else float(scale)
        if momentum_correction is None:
            momentum_correction = getattr(optimizer, "momentum_holds_lr", False)
        self.momentum_correction = momentum_correction
        super().__init__(optimizer, last_epoch)

    @property
    def scale(self) -> float:
        """The factor of the learning rate after the warm-up."""
        return float(size()) if self._scale is None else self._scale

    def get_lr(self) -> list[float | torch.Tensor]:
        """Learning rate of each group for the next step."""
        done = min(1.0, self.last_epoch / self.warmup_steps) if self.warmup_steps else 1.0
        factor = 1.0 + (self.scale - 1.0) * done
        rates = []
        for group in self.optimizer.param_groups:
            rates.append(group["lr"] * (factor / group.get(_FACTOR, 1.0)))
            group[_FACTOR] = factor
        return rates

    def step(self, epoch: int | None = None) -> None:
        """Advance by one step."""
        before = [float(group["lr"]) for group in self.optimizer.param_groups]
        super().step(epoch)
        if self.momentum_correction:
            for group, lr in zip(self.optimizer.param_groups, before, strict=True):
                momentum = group.get("momentum", 0.0)
                own, corrected = group.get(_CORRECTED, (momentum, momentum))
                own = own if momentum == corrected else momentum
                group["momentum"] = own * float(group["lr"]) / lr if lr else own
                group[_CORRECTED] = own, group["momentum"]
