"""prepare: a single-process training loop made data parallel in one line."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader

from ring_notebook.api.basics import local_rank, size
from ring_notebook.core import world
from ring_notebook.torch.collectives.tensor_arguments import check_module, check_optimizer
from ring_notebook.torch.optimizer.distributed import DistributedOptimizer, ReducingOptimizer
from ring_notebook.torch.training.broadcast_state import broadcast_optimizer_state, broadcast_parameters
from ring_notebook.torch.training.data import batch_size_of, shard
from ring_notebook.torch.training.noise_scale import NOISE_EVERY, measure_noise

__all__ = ["prepare"]


def prepare(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any] | None = None,
    *,
    scale_lr: bool = False,
    noise_scale: bool | int = False,
    **options: Any,
) -> tuple[torch.nn.Module, Any, Any]:
    """Make a single-process loop data parallel; returns ``(model, optimizer, loader)`` to use in place of the given.

    The model goes to this rank's device, model and optimizer start from rank 0's values, the optimizer becomes a
    `DistributedOptimizer` (``options`` are its keyword arguments), and the loader yields this rank's share in batches
    of the same size, shuffled anew in every pass. The batch of a step is thus ``size()`` times as large;
    ``scale_lr`` multiplies the learning rates by as much (Goyal et al. 2017), once per optimizer; make schedules
    afterwards, since they keep the rates that they found (there is a warning). ``noise_scale``
    measures the gradient noise scale, see `noise_scale`, in every 10th step, or in every so many, and every row that is
    logged has it, as ``noise_scale``. All ranks must call this. May be called again on what it returned.

    Raises ValueError for a ``noise_scale`` whose batch size ``loader`` does not tell, and TypeError for one of an
    optimizer with ``fused=True`` or ``op=Adasum``.
    """
    check_module(model, "prepare")
    check_optimizer(optimizer, "prepare")
    share = None if loader is None else shard(loader)
    if torch.cuda.is_available():
        model.to(_own_gpu())
    broadcast_parameters([*model.named_parameters(), *model.named_buffers()], root_rank=0)
    broadcast_optimizer_state(optimizer, root_rank=0)
    if scale_lr:
        _scale_rates(optimizer)
    options.setdefault("named_parameters", model.named_parameters())
    distributed = DistributedOptimizer(optimizer, **options)
    if isinstance(distributed, ReducingOptimizer):
        distributed._reducer.batch_size = None if loader is None else batch_size_of(loader)
    if noise_scale:
        measure_noise(distributed, NOISE_EVERY if noise_scale is True else noise_scale)
    return model, distributed, share


def _own_gpu() -> torch.device:
    """The GPU that ``cuda`` means for this rank."""
    if world.current().run is None:  # an engine sees its own one first; a script's ranks all see the same first
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def _scale_rates(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        # The factor stays in the group: a cell that is run again does not scale again.
        factor = size() / group.get("lr_scale", 1)
        group["lr_scale"] = size()
        group["lr"] *= factor
        if "initial_lr" in group:
            group["initial_lr"] *= factor
            if factor != 1:
                warnings.warn(
                    "prepare(scale_lr=True) after a learning rate schedule was made, which will set the rates that it "
                    "found then; make the schedule after prepare()",
                    stacklevel=3,
                )
