"""What ranks share beside the parameters and state of an optimizer, as far as the functions that were given it know."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ring_notebook.torch.steps.state_digest import is_shared, shared_buffers

__all__ = [
    "count_step",
    "note_models",
    "note_schedulers",
    "note_tensors",
    "schedulers_of",
    "set_steps",
    "steps_of",
    "tensors_beside",
]

_STEPS = "_ring_steps"
_MODELS = "_ring_models"
_SCHEDULERS = "_ring_schedulers"
_tensors: dict[str, weakref.ref[Tensor]] = {}


def count_step(optimizer: torch.optim.Optimizer) -> None:
    """Note that ``optimizer``, which wraps no other one, has made a step."""
    optimizer.__dict__[_STEPS] = optimizer.__dict__.get(_STEPS, 0) + 1


def steps_of(optimizer: torch.optim.Optimizer) -> int:
    """How many steps it has made in this process."""
    steps: int = optimizer.__dict__.get(_STEPS, 0)
    return steps


def set_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Count on from another rank's number of steps."""
    optimizer.__dict__[_STEPS] = steps


def note_models(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> None:
    """Note the models whose buffers ranks share while ``optimizer`` trains them."""
    optimizer.__dict__[_MODELS] = [weakref.ref(model) for model in models]


def note_schedulers(optimizer: torch.optim.Optimizer, schedulers: Sequence[Any]) -> None:
    """Note the learning rate schedulers of ``optimizer``."""
    optimizer.__dict__[_SCHEDULERS] = [weakref.ref(scheduler) for scheduler in schedulers]


def schedulers_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Those that have been noted and live."""
    return _alive(optimizer.__dict__.get(_SCHEDULERS, ()))


def note_tensors(named: Iterable[tuple[str, Any]]) -> None:
    """Note tensors that all ranks have been given, such as a moving average of weights.

    Those that need gradients are known from their optimizer, or trained by each rank for itself.
    """
    for name in [name for name, known in _tensors.items() if known() is None]:
        del _tensors[name]
    for name, tensor in named:
        if isinstance(tensor, Tensor) and not tensor.requires_grad and is_shared(name):
            _tensors[f"tensor {name} {tuple(tensor.shape)}"] = weakref.ref(tensor)


def tensors_beside(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Buffers of its models, and what `note_tensors` knows, each once."""
    seen = set()
    for model in _alive(optimizer.__dict__.get(_MODELS, ())):
        for name, buffer in shared_buffers(model):
            seen.add(id(buffer))
            yield name, buffer
    for name, known in sorted(_tensors.items()):
        tensor = known()
        if tensor is not None and id(tensor) not in seen:
            yield name, tensor


def _alive(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [one for reference in references if (one := reference()) is not None]
