"""Takes tensors out of the state of an object, such as a state_dict, to keep them in shards; puts them back."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ring_notebook.torch.steps.state_digest import STATISTICS
from ring_notebook.torch.tensors import is_sharded

_SMALL = 64  # elements up to which an optimizer's tensor, such as its number of steps, is not taken out


@dataclass(frozen=True)
class InShards:
    """Replaces a tensor that the shards have under ``name``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def take_out(state: Any, name: str, into: MutableMapping[str, Tensor], *, every: bool) -> Any:
    """A copy of ``state``, nested dicts and lists, with `InShards` in place of tensors, which are put ``into``.

    Their names begin with ``name``. Without ``every``, small tensors that are not sharded stay.
    """
    if isinstance(state, Tensor):
        if not (is_sharded(state) or type(state) in (Tensor, nn.Parameter)):
            return state  # another class, whose own memory does not hold its values
        if not every and not is_sharded(state) and state.numel() <= _SMALL:
            return state
        into[name] = state.detach()
        return InShards(name, tuple(state.shape), state.dtype)
    if isinstance(state, dict):
        made: dict[Any, Any] = copy.copy(state)
        for key, one in state.items():
            made[key] = take_out(one, f"{name}.{key}", into, every=every)
        if hasattr(state, "_metadata"):  # a state_dict's versions of modules
            made._metadata = state._metadata  # type: ignore[attr-defined]
        return made
    if isinstance(state, (list, tuple)):
        parts = [take_out(one, f"{name}.{number}", into, every=every) for number, one in enumerate(state)]
        return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
    return state


def taken_out(state: Any) -> list[InShards]:
    """The `InShards` in ``state``."""
    if isinstance(state, InShards):
        return [state]
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [found for one in inner for found in taken_out(one)]


def put_back(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """``state`` with ``tensors`` in place of their `InShards`."""
    if isinstance(state, InShards):
        return tensors[state.name]
    if isinstance(state, dict):
        for key, one in state.items():
            state[key] = put_back(one, tensors)
        return state
    if isinstance(state, (list, tuple)):
        parts = [put_back(one, tensors) for one in state]
        return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
    return state


def has_adapters(model: nn.Module) -> bool:
    """Whether ``model`` is one of peft, whose adapters alone are trained."""
    return hasattr(model, "peft_config") and any(not parameter.requires_grad for parameter in model.parameters())


def of_adapters(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The part of ``state`` of a model of peft that training changes: adapters, other trained weights, statistics."""
    kept = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    for path, module in model.named_modules(remove_duplicate=False):
        own = getattr(module, "adapter_layer_names", ())  # peft's layers, including adapters that are not in use
        kept |= {name for name in state if any(name.startswith(f"{path}.{part}.") for part in own)}
    return {name: one for name, one in state.items() if name in kept or name.rpartition(".")[2] in STATISTICS}
