"""check: finds parameters and optimizer state that differ between ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ring_notebook.api.basics import rank
from ring_notebook.api.objects import allgather_object
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.errors import DriftError
from ring_notebook.torch.collectives.allreduce import allreduce
from ring_notebook.torch.collectives.tensor_arguments import check_module, check_optimizer
from ring_notebook.torch.optimizer.local_optimizer import LocalOptimizer
from ring_notebook.torch.optimizer.wrapper import owners_of
from ring_notebook.torch.steps.state_digest import digest, marks, state_of
from ring_notebook.torch.tensors import is_sharded, parts_of, real_view

_REMEDY = (
    "start all ranks from the same values with broadcast_parameters and broadcast_optimizer_state, and step with a "
    "DistributedOptimizer (or use prepare)"
)


def check(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Raise DriftError on every rank when parameters or optimizer state differ between ranks in any bit.

    Beyond Horovod. The error names the first tensor that differs and by how much. Buffers of the model are not
    compared: running statistics differ by rank unless they are synchronized. Nor are sharded tensors (FSDP2). With
    local steps (``sync_every``) only the common weights are compared, because the rest is each rank's own. All ranks
    must call this; they exchange 8 bytes per tensor if they are equal.
    """
    check_module(model, "check")
    if optimizer is not None:
        check_optimizer(optimizer, "check")
    tensors = dict(_tensors(model, optimizer))
    found = marks(tensors)
    digests = torch.tensor([digest({name: found[name]}) for name in tensors], dtype=torch.int64, device="cpu")
    counts = allgather_object(len(tensors), name="drift check")
    if len(set(counts)) > 1:
        raise DriftError(
            f"rank {rank()}: the ranks hold different numbers of tensors, by rank: {counts}; build the same model "
            "and optimizer everywhere, and step everywhere"
        )
    lowest = allreduce(digests, op=ReduceOp.MIN, name="drift check")
    highest = allreduce(digests, op=ReduceOp.MAX, name="drift check")
    for (name, tensor), equal in zip(tensors.items(), (lowest == highest).tolist(), strict=True):
        if not equal:
            raise DriftError(_describe(name, tensor))


def _describe(name: str, tensor: Tensor) -> str:
    forms = allgather_object((name, tuple(tensor.shape), str(tensor.dtype)), name="drift check")
    if len(set(forms)) > 1:
        listed = "; ".join(f"rank {r}: {n} {shape} {dtype}" for r, (n, shape, dtype) in enumerate(forms))
        return f"rank {rank()}: the ranks hold different tensors ({listed}); build the same model everywhere"
    tells = f"rank {rank()}: {name} {tuple(tensor.shape)} differs between ranks"
    if not (tensor.is_floating_point() or tensor.is_complex()):  # differences of codes and counts mean nothing
        rows = allgather_object(tensor.detach().cpu(), name="drift")
        apart = torch.stack([row != rows[0] for row in rows]).any(0)
        return f"{tells} in {int(apart.sum())} elements; {_REMEDY}"
    values = real_view(tensor.detach()).double()
    spread = allreduce(values, op=ReduceOp.MAX, name="drift") - allreduce(values, op=ReduceOp.MIN, name="drift")
    return f"{tells} by up to {spread.max().item():.3g}; {_REMEDY}"


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    """Name and value of all tensors that must be equal."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    local = [one for one in owners_of(names) if isinstance(one, LocalOptimizer)]
    common = {parameter: one for owner in local for parameter, one in owner.common.items()}
    for parameter, name in names.items():
        if parameter in common:
            yield f"common weights of {name}", common[parameter]
        elif not is_sharded(parameter):
            yield from parts_of(f"parameter {name}", parameter)
    if optimizer is not None and not local:
        yield from state_of(optimizer, names)
