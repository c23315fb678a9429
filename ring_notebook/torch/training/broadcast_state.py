"""Broadcasts one rank's parameters and optimizer state to all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ring_notebook.api.objects import broadcast_object, is_alone
from ring_notebook.api.process_sets import global_process_set
from ring_notebook.torch.collectives.broadcast import broadcast_
from ring_notebook.torch.collectives.tensor_arguments import check_optimizer
from ring_notebook.torch.optimizer.wrapper import original_of, parameters_of
from ring_notebook.torch.steps.optimizer_notes import load_state, note_tensors
from ring_notebook.torch.tensors import is_sharded, parts_of

Parameters = Mapping[str, Any] | Iterable[Any]


def broadcast_parameters(params: Parameters, root_rank: int) -> None:
    """Overwrite ``params`` with those of ``root_rank``, in place (Horovod: ``broadcast_parameters``).

    ``params`` is a ``state_dict()``, or named or plain tensors (``named_parameters()``, ``parameters()``). All ranks
    give the same names and shapes. Entries that are None are skipped. Raises ValueError, before anything is sent, for
    an entry that is not a tensor, is expanded, or is sharded: each rank has its own share of a DTensor.
    """
    if isinstance(params, Mapping):
        # Sorted: other ranks may have filled their dict in another order.
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, Tensor):
        named = [entry if isinstance(entry, tuple) else (f"parameter {i}", entry) for i, entry in enumerate(params)]
    else:
        raise ValueError(f"broadcast_parameters takes a dict or a list of tensors, got {type(params).__name__}")
    note_tensors(named)
    broadcast_tensors(named, root_rank)


def broadcast_tensors(named: Sequence[tuple[str, Any]], root_rank: int) -> None:
    """As `broadcast_parameters`, for named tensors."""
    if is_alone():
        return
    parts: list[tuple[str, Tensor]] = []
    for name, tensor in named:
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"broadcast_parameters: {name!r} is a {type(tensor).__name__}; use broadcast_object for it"
            )
        if is_sharded(tensor):
            raise _sharded("broadcast_parameters", repr(name))
        parts += parts_of(name, tensor)
    for name, part in parts:
        _check_overlap(name, part)
    for name, part in parts:
        broadcast_(part, root_rank, name)


def _sharded(function: str, what: str) -> ValueError:
    return ValueError(
        f"rank {global_process_set.rank()}: {function}: {what} is sharded over the ranks (a DTensor), and one rank's "
        "share is not that of the others; call it before the model is sharded, or leave it out, since "
        "prepare(strategy='fsdp') does the same before it shards, and ring.checkpoint() restores sharded models"
    )


def _check_overlap(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor with several elements at one place in memory, which cannot be written."""
    if tensor.layout is torch.strided and any(
        length > 1 and stride == 0 for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ValueError(
            f"rank {global_process_set.rank()}: {name!r} of shape {tuple(tensor.shape)} is expanded: several of its "
            f"elements are one place in memory (strides {tensor.stride()}), so no rank can be given values there. Make "
            "it a tensor of its own with .clone() before prepare() or broadcast_parameters()"
        )


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give ``optimizer`` the state and options of ``root_rank``'s (Horovod: ``broadcast_optimizer_state``).

    Replaces the state of the other ranks, which need not have made a step yet. ``model`` is Horovod's argument and has
    no effect. Raises TypeError for anything but an optimizer, and ValueError, before anything is sent, for one of
    sharded parameters.
    """
    check_optimizer(optimizer, "broadcast_optimizer_state")
    if not is_alone() and any(map(is_sharded, parameters_of(optimizer))):
        raise _sharded("broadcast_optimizer_state", f"a parameter of {type(original_of(optimizer)).__name__}")
    state = broadcast_object(optimizer.state_dict(), root_rank, "optimizer state")
    if global_process_set.rank() != root_rank:
        # The groups stay the same objects: an optimizer within this one may have them too.
        groups, own = optimizer.param_groups, list(optimizer.param_groups)
        load_state(optimizer, state)
        for group, loaded in zip(own, optimizer.param_groups, strict=True):
            group.update(loaded)
        groups[:] = own
        optimizer.param_groups = groups
