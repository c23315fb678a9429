"""What an optimizer and a loader were made with, as hyper-parameters of the run."""

from __future__ import annotations

from typing import Any

import torch

from ring_notebook.core.logged.metrics import note_params

__all__ = ["note_loader", "note_optimizer"]

# Of a parameter group; what a switch leaves off says nothing.
_OPTIONS = ("lr", "momentum", "weight_decay", "betas", "eps", "nesterov", "alpha", "amsgrad")


def note_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Record the class of an optimizer and the options of its first group."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    options = {name: group[name] for name in _OPTIONS if group.get(name)}
    note_params(optimizer=_class_of(optimizer), **options)


def note_loader(loader: Any) -> None:
    """Record the batch of a rank, where the loader has a size of its own."""
    if batch := getattr(loader, "batch_size", None):
        note_params(batch_size=batch)


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of the class that a user wrote, of a distributed optimizer too."""
    return next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.")), "")
