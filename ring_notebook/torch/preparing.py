"""prepare: a single-process training loop made data parallel in one line."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from ring_notebook.torch.basics import local_rank, size
from ring_notebook.torch.functions import broadcast_optimizer_state, broadcast_parameters
from ring_notebook.torch.optimizer import DistributedOptimizer
from ring_notebook.torch.sharding import shard

__all__ = ["prepare"]


def prepare(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any] | None = None,
    *,
    scale_lr: bool = False,
    **options: Any,
) -> tuple[torch.nn.Module, Any, Any]:
    """Make a single-process loop data parallel; returns ``(model, optimizer, loader)`` to use in place of the given.

    The model goes to this rank's device, model and optimizer start from rank 0's values, the optimizer becomes a
    `DistributedOptimizer` (``options`` are its keyword arguments), and the loader yields this rank's share in batches
    of the same size, shuffled anew in every pass. The batch of a step is thus ``size()`` times as large;
    ``scale_lr`` multiplies the learning rates by as much (Goyal et al. 2017), once per optimizer. All ranks must call
    this. May be called again on what it returned.
    """
    if torch.cuda.is_available():
        model.to(torch.device("cuda", local_rank() % torch.cuda.device_count()))
    broadcast_parameters([*model.named_parameters(), *model.named_buffers()], root_rank=0)
    broadcast_optimizer_state(optimizer, root_rank=0)
    if scale_lr:
        for group in optimizer.param_groups:
            # The factor stays in the group: a cell that is run again does not scale again.
            group["lr"] *= size() / group.get("lr_scale", 1)
            group["lr_scale"] = size()
    options.setdefault("named_parameters", model.named_parameters())
    distributed = DistributedOptimizer(optimizer, **options)
    return model, distributed, None if loader is None else shard(loader)
