"""Shared by the `prepare` of every face: the kinds of objects, the rank whose values count, and the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from importlib import import_module
from typing import Any

from ring_notebook.api.objects import gather_objects
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core import world
from ring_notebook.frameworks import Framework, frameworks


def framework_of(value: object) -> Framework | None:
    """The framework of the first class in the MRO of ``value`` that has one: a model may be a module of another too."""
    for kind in type(value).__mro__:
        for known in frameworks():
            if known.named_in([kind.__module__]):
                return known
    return None


def of_another(function: str, objects: Sequence[Any], own: str) -> Callable[..., Any] | None:
    """``function`` of the face that one of ``objects`` belongs to, if it is not the face of ``own``; else None."""
    for one in objects:
        found = framework_of(one)
        if found is not None and found.name != own:
            other: Callable[..., Any] | None = getattr(import_module(found.face), function, None)
            if other is not None:
                return other
    return None


def by_kind(objects: Sequence[Any], kinds: Mapping[str, Callable[[Any], bool]]) -> dict[str, list[Any]]:
    """The objects by kind; keys are plurals. An object belongs to the first kind that takes it.

    Raises TypeError without objects, and for an object of no kind; the message names the argument.
    """
    *most, last = kinds
    taken = f"{', '.join(most)} and {last}" if most else last
    if not objects:
        raise TypeError(f"prepare takes {taken}, got no argument")
    found: dict[str, list[Any]] = {name: [] for name in kinds}
    for number, one in enumerate(objects, 1):
        name = next((name for name, takes in kinds.items() if takes(one)), None)
        if name is None:
            raise TypeError(f"prepare takes {taken}; argument {number} is {_described(one)}")
        found[name].append(one)
    return found


def in_order(objects: Sequence[Any], prepared: Mapping[int, Any]) -> Any:
    """The replacements of ``objects`` in their order, from ``prepared`` by id; a single object's alone, not a tuple."""
    returned = tuple(prepared[id(one)] for one in objects)
    return returned if len(returned) > 1 else returned[0]


def check_same_options(given: Mapping[str, Any], made_with: Mapping[str, Any]) -> None:
    """Raise ValueError for options other than those with which an optimizer was distributed: they would do nothing."""
    for name, value in given.items():
        before = made_with.get(name, value)
        if _ranks_of(value) != _ranks_of(before):
            raise ValueError(
                f"prepare: this optimizer was distributed with {name}={_shown(before)} before, got {_shown(value)}; "
                "make the optimizer again, and prepare that"
            )


def _ranks_of(value: Any) -> Any:
    return value.ranks if isinstance(value, ProcessSet) else value


def _shown(value: Any) -> str:
    return value.name if isinstance(value, Enum) else str(_ranks_of(value))


def furthest(steps: Sequence[int]) -> tuple[int, Sequence[int]]:
    """The first rank that has made the most steps, and its steps; ``steps`` are this rank's.

    Rank 0 when the ranks cannot have diverged. All ranks call this, then take that rank's values.
    """
    if world.disruptions() == 0:
        return 0, steps
    rows: list[Sequence[int]] = gather_objects(list(steps), "steps made", global_process_set)
    root = max(range(len(rows)), key=lambda rank: (sum(rows[rank]), -rank))
    return root, rows[root]


def _described(value: object) -> str:
    """``value`` for an error: its class, and its repr if that is short."""
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) < 60 else f"an object of class {type(value).__name__}"
