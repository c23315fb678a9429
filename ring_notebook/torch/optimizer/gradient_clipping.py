"""clip_grad_norm_: gradients clipped after they have been reduced."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ring_notebook.torch.optimizer.reducing_optimizer import ReducingOptimizer
from ring_notebook.torch.optimizer.wrapper import owners_of


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` of gradients that all ranks have reduced; all ranks call it. Beyond Horovod.

    Between ``backward()`` and ``step()`` gradients are this rank's own: torch's function would clip each rank by
    its own norm. This one first reduces those of every `DistributedOptimizer` that has one of ``parameters``; its next
    ``step()`` takes them as they are. Returns the norm before clipping, the same on every rank. Between the steps of
    accumulated micro-batches (``prepare(accumulate=...)``) it clips nothing. Gradients of DistributedDataParallel and
    FSDP2 have been reduced by these. Raises TypeError for optimizers with ``fused=True`` or ``op=Adasum``, which reduce
    within their step.
    """
    chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    between = False
    for owner in owners_of(chosen):
        if not isinstance(owner, ReducingOptimizer):
            raise TypeError(
                "clip_grad_norm_ needs the reduced gradients, and an optimizer with fused=True or op=Adasum has none "
                "before its step; leave fused and Adasum out"
            )
        between = owner.reduce_for_clipping() or between
    if between:
        return torch.nn.utils.get_total_norm([p.grad for p in chosen if p.grad is not None], norm_type)
    return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite, foreach)
