"""Notes about an optimizer beside its state: its steps, models and schedulers; and tensors that ranks share."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ring_notebook.torch.steps.state_digest import is_shared, shared_buffers
from ring_notebook.torch.tensors import parts_of

_NOTES = "_ring_notes"
_tensors: dict[str, Callable[[], Tensor | None]] = {}


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """As ``load_state_dict``, but bit for bit: torch would convert state to the parameter's dtype, even 8-bit state."""
    optimizer.load_state_dict(state)
    given: dict[Any, Any] = state["state"]
    keys = (key for group in state["param_groups"] for key in group["params"])
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for key, parameter in zip(keys, parameters, strict=True):
        if key in given and parameter in optimizer.state:
            optimizer.state[parameter] = _exact(optimizer.state[parameter], given[key])


def _exact(loaded: Any, given: Any) -> Any:
    if isinstance(loaded, Tensor) and isinstance(given, Tensor):
        return loaded if loaded.dtype == given.dtype else given.to(loaded.device, copy=True)
    if isinstance(loaded, dict) and isinstance(given, Mapping):
        loaded.update({key: _exact(one, given[key]) for key, one in loaded.items() if key in given})
    return loaded


@dataclass(eq=False)
class Notes:
    """Notes about an optimizer that wraps no other one."""

    steps: int = 0
    """Number of steps in this process; with local steps, of syncs."""
    outer: Any = None
    """With local steps: the outer optimizer's state."""
    knobs_of: str | None = None
    """The last run that got its knobs; None before the first."""
    compared: tuple[int, int] | None = None
    """The number of disruptions that the comparison covers, and of shares compared; None before it is prepared."""
    frozen: Mapping[int, None] | None = None
    """The ids of the parameters that needed no gradients when it was prepared."""
    was_wrapped: bool = False
    """Whether another optimizer has averaged its gradients."""
    training: Any = None
    """See `plain_optimizers`."""
    models: Iterable[nn.Module] = ()
    """The models that it trains and whose buffers ranks share, as far as they still exist."""
    schedulers: Iterable[Any] = ()
    """Its learning rate schedulers that still exist."""

    def refer(self, models: Iterable[nn.Module], schedulers: Iterable[Any]) -> None:
        """Note models and schedulers without keeping them alive."""
        self.models = WeakKeyDictionary(dict.fromkeys(models))
        self.schedulers = WeakKeyDictionary(dict.fromkeys(schedulers))


def notes_of(optimizer: torch.optim.Optimizer) -> Notes:
    """The notes of ``optimizer``, in an attribute that its state_dict, copies and pickles leave out."""
    notes: Notes | None = optimizer.__dict__.get(_NOTES)
    if notes is None:
        notes = optimizer.__dict__[_NOTES] = Notes()
    return notes


def note_tensors(named: Iterable[tuple[str, Any]]) -> None:
    """Note tensors that are equal on all ranks, such as a moving average of weights, or buffers of a model.

    Ignores tensors that need gradients: their optimizer has them, or each rank trains its own. For a tensor from a
    state_dict it notes the module's tensor in the same memory.
    """
    given = [(name, one) for name, one in named if isinstance(one, Tensor) and not one.requires_grad]
    keepers = _keepers([one for _, one in given])
    for name in [name for name, find in _tensors.items() if find() is None]:
        del _tensors[name]
    for name, tensor in given:
        module, attribute, kept = keepers.get(_memory(tensor), (None, name, tensor))
        if is_shared(attribute, module) and not kept.requires_grad:
            find = weakref.ref(kept) if module is None else partial(_attribute, weakref.ref(module), attribute)
            _tensors[f"tensor {name} {tuple(tensor.shape)}"] = find


def _keepers(tensors: Sequence[Tensor]) -> dict[Any, tuple[nn.Module, str, Tensor]]:
    """By the memory of ``tensors``: the module that has a parameter or buffer there, its name, and the value."""
    wanted = {_memory(tensor) for tensor in tensors} - {None}
    found = {}
    for one in gc.get_objects() if wanted else ():
        if issubclass(type(one), nn.Module):
            with suppress(AttributeError):  # a module that was never initialized
                for name, kept in (*one.named_parameters(recurse=False), *one.named_buffers(recurse=False)):
                    memory = _memory(kept)
                    if memory in wanted:
                        found[memory] = one, name, kept
    return found


def _memory(tensor: Tensor) -> tuple[int, tuple[int, ...]] | None:
    """The address of a tensor and its shape; None for one without memory of its own."""
    try:
        return (tensor.data_ptr(), tuple(tensor.shape)) if tensor.numel() else None
    except (RuntimeError, ValueError):  # a lazy module's parameter
        return None


def _attribute(module: weakref.ref[nn.Module], name: str) -> Tensor | None:
    found = getattr(module(), name, None)
    return found if isinstance(found, Tensor) else None


def tensors_beside(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Buffers of its models, and the tensors of `note_tensors`, each once."""
    seen = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for number, model in enumerate(notes_of(optimizer).models):
        for name, buffer in shared_buffers(model):
            seen.add(id(buffer))
            yield from parts_of(f"{name} of model {number}" if number else name, buffer)
    for name, find in sorted(_tensors.items()):
        tensor = find()
        if tensor is not None and id(tensor) not in seen:
            yield from parts_of(name, tensor)
