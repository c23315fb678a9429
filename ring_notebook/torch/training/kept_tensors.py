"""Takes tensors out of the state of an object, such as a state_dict, to keep them in shards; gathers sharded ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ring_notebook.torch.steps.state_digest import STATISTICS
from ring_notebook.torch.tensors import is_sharded

_SMALL = 64  # elements up to which an optimizer's tensor, such as its number of steps, is not taken out


_COMPILED = "_orig_mod."


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

    def taken(tensor: Tensor, own_name: str) -> Any:
        if not (is_sharded(tensor) or type(tensor) in (Tensor, nn.Parameter)):
            return tensor  # another class, whose own memory does not hold its values
        if not every and not is_sharded(tensor) and tensor.numel() <= _SMALL:
            return tensor
        into[own_name] = tensor.detach()
        return InShards(own_name, tuple(tensor.shape), tensor.dtype)

    return _mapped(state, name, taken)


def _mapped(state: Any, name: str, change: Callable[[Tensor, str], Any]) -> Any:
    """A copy of ``state``, nested dicts and lists, with the results of ``change`` in place of its tensors."""
    if isinstance(state, Tensor):
        return change(state, name)
    if isinstance(state, dict):
        made: dict[Any, Any] = copy.copy(state)
        for key, one in state.items():
            made[key] = _mapped(one, f"{name}.{key}", change)
        if hasattr(state, "_metadata"):  # a state_dict's versions of modules
            made._metadata = state._metadata  # type: ignore[attr-defined]
        return made
    if isinstance(state, (list, tuple)):
        parts = [_mapped(one, f"{name}.{number}", change) for number, one in enumerate(state)]
        return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
    return state


def _leaves(state: Any, above: tuple[int, ...] = ()) -> Iterator[Any]:
    """What nested dicts and lists have that is neither."""
    if not isinstance(state, (dict, list, tuple)):
        yield state
    elif id(state) not in above:  # else it is in itself
        for one in state.values() if isinstance(state, dict) else state:
            yield from _leaves(one, (*above, id(state)))


def has_sharded(state: Any) -> bool:
    """Whether nested dicts and lists have a sharded tensor."""
    return any(isinstance(one, Tensor) and is_sharded(one) for one in _leaves(state))


def gathered(state: Any, *, keep: bool) -> Any:
    """``state``, nested dicts and lists, with whole tensors in host memory in place of sharded ones.

    A collective of the ranks of these tensors, which must have them in the same order. Without ``keep`` this rank
    helps the others only, and gets None.
    """
    whole: dict[int, Tensor] = {}  # a tensor that is there twice stays one

    def change(tensor: Any, _: str) -> Any:
        if not is_sharded(tensor):
            return tensor
        if id(tensor) not in whole:
            found: Tensor = tensor.detach().full_tensor()
            whole[id(tensor)] = found.cpu() if keep else tensor
        return whole[id(tensor)]

    made = _mapped(state, "", change)
    return made if keep else None


def taken_out(state: Any) -> list[InShards]:
    """The `InShards` in ``state``."""
    return [one for one in _leaves(state) if isinstance(one, InShards)]


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


def uncompiled_name(name: str) -> str:
    """The ``name`` of a parameter as before `torch.compile`, which gives its module another level."""
    return name.replace(_COMPILED, "")


def renamed(state: dict[str, Any], name_of: Callable[[str], str]) -> dict[str, Any]:
    """A state_dict with other names; itself if no name changes."""
    if all(name_of(name) == name for name in state):
        return state
    made = type(state)((name_of(name), one) for name, one in state.items())
    if hasattr(state, "_metadata"):  # a state_dict's versions of modules
        versions = {name_of(f"{path}.").removesuffix("."): one for path, one in state._metadata.items()}
        made._metadata = versions  # type: ignore[attr-defined]
    return made


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
