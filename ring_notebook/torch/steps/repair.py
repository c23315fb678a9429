"""Compares ranks whose states may have diverged, at an optimizer's first steps after that, and makes them equal again.

After a generation that ended without an abort there is nothing to compare. After an abort each optimizer is compared
once: its parameters, state and options, and the tensors of `tensors_beside`, as one sum over all ranks. To cost about a
hundredth of a step, each of 16 steps compares one share of the large tensors. A step that only some ranks have made
changes all shares, so the first comparison finds it. Ranks that differ continue from a rank with the most steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ring_notebook.api import preparation
from ring_notebook.api.objects import allreduce_numbers, are_alike, broadcast_object, gather_objects
from ring_notebook.api.process_sets import ProcessSet
from ring_notebook.config import config
from ring_notebook.core import world
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.errors import DriftError
from ring_notebook.text import words
from ring_notebook.torch.collectives.broadcast import broadcast_
from ring_notebook.torch.steps.optimizer_notes import load_state, notes_of, tensors_beside
from ring_notebook.torch.steps.state_digest import SHARES, digest, has_shares, marks, options_of, state_of
from ring_notebook.torch.tensors import parts_of

_MOST_NAMES = 4  # in a message


@dataclass(frozen=True, slots=True)
class Shared:
    """The part of a training that must be equal on the ranks of ``process_set``."""

    optimizer: torch.optim.Optimizer
    """The user's optimizer, which may be wrapped."""
    names: Mapping[Tensor, str]
    """Names of parameters; a parameter without a name is named by its position."""
    process_set: ProcessSet
    state: bool = True
    """Whether the ranks have the same optimizer state; False if each has a share, or its own."""
    weights: bool = True
    """Whether the ranks have the same parameters; False if each has a share."""
    give_state: Callable[[int], None] | None = None
    """A collective that copies the state from a global rank, if ``optimizer`` itself does not have it."""
    equal: Sequence[tuple[str, Tensor]] | None = None
    """With local steps, the only equal tensors, by name; None: everything above is equal."""

    def values(self) -> dict[str, Any]:
        if self.equal is not None:
            return dict(self.equal)
        found: dict[str, Any] = dict(options_of(self.optimizer))
        for scheduler in notes_of(self.optimizer).schedulers:
            plain = {k: v for k, v in scheduler.state_dict().items() if isinstance(v, (int, float, list, tuple))}
            found[f"schedule {type(scheduler).__name__}"] = sorted(plain.items())
        if not self.weights:
            found["steps made"] = notes_of(self.optimizer).steps
        else:
            found |= {f"parameter {name}": parameter for name, parameter in self.parameters()}
            found |= tensors_beside(self.optimizer)
        if self.state:
            found |= state_of(self.optimizer, self.names)
        return found

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Name and value of each parameter, in parts, without those that have always been frozen."""
        frozen = notes_of(self.optimizer).frozen or {}
        return [
            part
            for g, group in enumerate(self.optimizer.param_groups)
            for i, parameter in enumerate(group["params"])
            if parameter.requires_grad or id(parameter) not in frozen
            for part in parts_of(self.names.get(parameter, f"group {g} parameter {i}"), parameter)
        ]


def trust(optimizer: torch.optim.Optimizer) -> None:
    """Note that ``optimizer`` is new: it needs no comparison after earlier aborts, unless another rank's is older."""
    notes = notes_of(optimizer)
    notes.compared = notes.compared or (world.disruptions(), SHARES)
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if notes.frozen is None:
        notes.frozen = {id(one): None for one in parameters if not one.requires_grad}


def begin(optimizer: torch.optim.Optimizer, process_set: ProcessSet) -> None:
    """Agree on the shares to compare; all ranks of the set call this at an optimizer's first step of a generation."""
    disruptions = world.disruptions()
    if disruptions == 0:
        return
    until, compared = notes_of(optimizer).compared or (0, 0)
    own = compared if until == disruptions else 0
    ranks = allreduce_numbers(
        [int(own == share) for share in range(SHARES)], ReduceOp.SUM, "ranks that may have parted", process_set
    )
    least = next((share for share, count in enumerate(ranks) if count), SHARES)
    notes_of(optimizer).compared = disruptions, least


def may_have_parted(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a share of ``optimizer`` must be compared at this step; equal on all ranks after `begin`."""
    compared = notes_of(optimizer).compared
    return compared is not None and compared[1] < SHARES


def furthest(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """The first rank that has made the most steps; 0 when the ranks cannot have diverged.

    All ranks call this, then take that rank's values; this call already takes over its number of steps.
    """
    root, made = preparation.furthest([notes_of(optimizer).steps for optimizer in optimizers])
    if world.disruptions() > 0:
        for optimizer, steps in zip(optimizers, made, strict=False):
            notes_of(optimizer).steps = steps
    return root


def mend(shared: Shared, whole: bool = False) -> bool:
    """Compare the next share, or with ``whole`` all shares, and make the ranks equal; returns whether they differed.

    All ranks of the set call this. All raise DriftError if RING_REPAIR forbids a repair, or if each rank has a share of
    the weights that no other rank has.
    """
    notes = notes_of(shared.optimizer)
    disruptions, share = notes.compared or (0, 0)
    values = shared.values()
    own = marks(values, None if whole else share)
    alike, _ = are_alike(digest(own) >> 15, "digest of what ranks share", shared.process_set)
    goes_on = alike and not whole and has_shares(values)
    notes.compared = disruptions, share + 1 if goes_on else SHARES
    if alike:
        return False
    rows: list[dict[str, Any]] = gather_objects(own, "digests of ranks that may have parted", shared.process_set)
    if len({frozenset(name for name in row if name.startswith("parameter ")) for row in rows}) > 1:
        return False  # the ranks train different parameters
    steps: list[int] = gather_objects(notes.steps, "steps made", shared.process_set)
    differing = sorted({name for row in rows for name in row if len({other.get(name) for other in rows}) > 1})
    at = _root(rows, steps)
    ranks = shared.process_set.ranks or []
    root = ranks[at]
    others = [rank for rank, row in zip(ranks, rows, strict=True) if row != rows[at]]
    since = (
        "since a run that failed or was stopped" if disruptions or world.disruptions() else "before their first step"
    )
    text = f"{words.ranks(others)} differ{'s' * (len(others) == 1)} from rank {root} {since}: {_listed(differing)}" + (
        f"; steps made, by rank: {steps}" if len(set(steps)) > 1 else ""
    )
    _check_allowed(shared, text, root)
    given = shared.equal
    if given is None:
        beside = [(name, one) for name, one in tensors_beside(shared.optimizer) if all(name in row for row in rows)]
        given = [*shared.parameters(), *beside]
    for name, tensor in given:
        broadcast_(tensor, root, name, shared.process_set)
    if shared.give_state is not None:
        shared.give_state(root)
    give_rest(shared, root)
    notes.steps = steps[at]
    return True


def _root(rows: list[dict[str, Any]], steps: list[int]) -> int:
    """The index of a rank with the most steps; if there are several, one whose values most of these have."""
    leading = [index for index, made in enumerate(steps) if made == max(steps)]
    return max(leading, key=lambda index: (sum(rows[index] == rows[other] for other in leading), -index))


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")


def _check_allowed(shared: Shared, text: str, root: int) -> None:
    """Report the repair on the first rank; raise DriftError if it is not allowed."""
    process_set = shared.process_set
    first = process_set.rank() == 0
    where = f"rank {world.current().rank}: "
    if not shared.weights:
        raise DriftError(
            f"{where}{text}. The weights are sharded, no other rank has a copy: load a checkpoint on all ranks"
        )
    repair = config().repair
    if repair == "ask":
        asked = f"{text}. Continue from rank {root} on all ranks? [Y/n] "
        try:
            agreed = input(asked).strip().lower() in ("", "y", "yes") if first else True
        except (EOFError, OSError):  # there is no user to ask
            agreed = False
        repair = broadcast_object(
            "broadcast" if agreed else "error", (process_set.ranks or [0])[0], "repair", process_set
        )
    if repair == "error":
        raise DriftError(
            f"{where}{text}. Make the ranks equal with broadcast_parameters and broadcast_optimizer_state, or set "
            "RING_REPAIR=broadcast, which continues from the rank with the most steps"
        )
    if first:
        print(  # noqa: T201
            f"{text}. All ranks continue from rank {root}; earlier gradients are dropped.",
            file=sys.stderr,
        )


def give_rest(shared: Shared, root: int) -> None:
    """Broadcast the options, the schedules and, if ranks share it, the state of the optimizer."""
    optimizer = shared.optimizer
    schedulers = list(notes_of(optimizer).schedulers)
    whole: dict[str, Any] = optimizer.state_dict() if shared.state else {}
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    plans = [scheduler.state_dict() for scheduler in schedulers]
    whole, options, plans = broadcast_object((whole, options, plans), root, "optimizer state", shared.process_set)
    if world.current().rank == root:
        return
    if whole:
        load_state(optimizer, whole)
    for group, given in zip(optimizer.param_groups, options, strict=True):
        for key, value in given.items():
            if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
    for scheduler, plan in zip(schedulers, plans, strict=False):
        scheduler.load_state_dict(plan)
