"""The memory of tensors in this process, by variable, and the memory that torch caches."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_DEEPEST = 6
"""Levels of objects below a variable that are searched."""
_MOST = 10_000
"""Members of a list or a dict that are searched."""

Row = tuple[str, str, int]


def held(variables: Mapping[str, Any]) -> list[Row]:
    """Variable, device and bytes of tensors, most bytes first; the variable is empty for tensors of no variable.

    Memory that several variables share counts for the first of them by name. Tensors of no variable belong to a running
    function, an exception's frames, or a library.
    """
    seen: set[int] = set()
    found: dict[tuple[str, str], int] = {}

    def count(name: str, tensor: Tensor) -> None:
        for storage in _storages(tensor):
            if storage.data_ptr() not in seen and storage.nbytes():
                seen.add(storage.data_ptr())
                key = name, str(storage.device)
                found[key] = found.get(key, 0) + storage.nbytes()

    for name in sorted(variables):
        for tensor in _within(variables[name], _DEEPEST, set()):
            count(name, tensor)
    for one in gc.get_objects():
        if issubclass(type(one), Tensor):
            count("", one)
    return sorted(((name, device, size) for (name, device), size in found.items()), key=lambda row: -row[2])


def empty_caches() -> int:
    """Give cached memory of GPUs back to their drivers; returns its bytes."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    before = sum(torch.cuda.memory_reserved(number) for number in range(torch.cuda.device_count()))
    torch.cuda.empty_cache()
    return before - sum(torch.cuda.memory_reserved(number) for number in range(torch.cuda.device_count()))


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    try:
        if tensor.layout is not torch.strided:
            return
        yield tensor.untyped_storage()
    except (RuntimeError, NotImplementedError, ValueError):  # it has none: made of other tensors, or not yet made
        return
    if tensor.is_leaf and tensor.grad is not None:
        yield tensor.grad.untyped_storage()


def _within(value: Any, levels: int, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen or levels < 0 or isinstance(value, ModuleType | type | str | bytes):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from _within(group, levels - 1, seen)
        yield from _within(dict(value.state), levels - 1, seen)
    elif isinstance(value, Mapping):
        if len(value) <= _MOST:
            for one in list(value.values()):
                yield from _within(one, levels - 1, seen)
    elif isinstance(value, list | tuple | set):
        if len(value) <= _MOST:
            for one in list(value):
                yield from _within(one, levels - 1, seen)
    elif isinstance(getattr(value, "__dict__", None), dict):
        yield from _within(vars(value), levels - 1, seen)
