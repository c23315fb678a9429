"""torch's own wrappers for `prepare`: DistributedDataParallel and FSDP2, on the run's process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ring_notebook.core import world
from ring_notebook.torch.process_group.run_groups.default_group import process_group

__all__ = ["STRATEGIES", "unwrapped", "wrap"]


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: str) -> nn.Module:
    """``model`` wrapped as ``strategy`` says; ``optimizer`` updates what the wrapped model trains.

    Raises ValueError for an unknown strategy, and for an optimizer whose state would have to be sharded.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be {' or '.join(map(repr, STRATEGIES))}, got {strategy!r}")
    backend = "nccl" if any(parameter.is_cuda for parameter in model.parameters()) else None
    process_group(backend)
    return STRATEGIES[strategy](model, optimizer)


def unwrapped(model: nn.Module) -> nn.Module:
    """What a DistributedDataParallel trains; any other model itself."""
    inner: nn.Module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return inner


def _ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    if model is not unwrapped(model) and world.doubts() == 0:  # the cell runs again
        return model
    model = unwrapped(model)  # a backward pass that has raised leaves the wrapper unusable
    # A view of the bucket saves the copy of each gradient.
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def _fsdp(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if isinstance(model, FSDPModule):
        return model
    if optimizer.state:
        raise ValueError(
            "prepare(strategy='fsdp') shards the parameters, and the optimizer has state of whole ones already; make a "
            "new optimizer, and load the state afterwards with torch.distributed.checkpoint"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child)
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule) and dist.get_backend() == "ring":
            module.set_allocate_memory_from_process_group_for_comm(True)  # its buffers lie in ring memory
    sharded: dict[str, Any] = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[id(parameter)]] for parameter in group["params"]]
    return model


STRATEGIES = {"ddp": _ddp, "fsdp": _fsdp}
