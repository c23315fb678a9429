"""The parts of a model that FSDP2 gathers one at a time."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def sharded_units(model: nn.Module) -> list[nn.Module]:
    """The modules to give to ``fully_shard`` before ``model`` itself, which gathers the remaining parameters.

    These are its children. A child that holds a list of blocks at any depth, such as a transformer within an adapter's
    wrapper, is replaced by the blocks; a child without forward, which is never called, by its members. Modules that
    share parameters with modules outside (tied weights) are left out.
    """
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    names = {module: name for name, module in model.named_modules()}
    return [
        unit
        for unit in dict.fromkeys(_candidates(model))
        if (own := list(unit.parameters()))
        and all(place.startswith(f"{names[unit]}.") for one in own for place in places[id(one)])
    ]


def _candidates(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        yield from _blocks(child) if _has_list(child) or not _is_called(child) else (child,)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the topmost lists, and of other modules without forward, within ``module``."""
    for child in module.children():
        if not _is_called(module) and _is_called(child):
            yield child
        elif _has_list(child) or not (_is_called(module) or _is_called(child)):
            yield from _blocks(child)


def _has_list(module: nn.Module) -> bool:
    return any(isinstance(one, nn.ModuleList) for one in module.modules())


def _is_called(module: nn.Module) -> bool:
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward
