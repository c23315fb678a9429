"""Knobs of a prepared optimizer: its learning rate, weight decay and momentum, which its user may change in a run.

A change of a rate or decay multiplies the values of all parameter groups by one factor, and also the rates from which
schedules compute theirs. So groups keep their proportions, and a schedule its shape. A value that becomes 0
is kept in its group or schedule, so that checkpoints and snapshots have it too.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ring_notebook.core import freed_memory
from ring_notebook.core.steering import Knob, steering
from ring_notebook.protocol.knobs import Range
from ring_notebook.torch.steps.optimizer_notes import notes_of

RATES = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "swa_lr"})
"""Keys of a parameter group that hold rates, such as the bounds of OneCycleLR and the target of SWALR."""
_OF_SCHEDULES = ("max_lrs", "min_lrs", "default_min_lr", "eta_min", "_last_lr")
"""Attributes in which CyclicLR, ReduceLROnPlateau and cosine schedules keep rates beside `base_lrs`."""
_BEFORE_0 = "before_0"
"""Key of a parameter group, and attribute of a schedule: its values before a knob was set to 0."""
_LIMITS = {"lr": None, "weight_decay": None, "momentum": 1.0, "betas": 0.999999}  # Adam refuses 1


def scale_schedules(optimizer: torch.optim.Optimizer, schedules: Iterable[Any], factor: float) -> None:
    """Multiply the rates that ``schedules`` keep by ``factor``, after the rates of ``optimizer``."""
    for one in _with_held(schedules):
        if hasattr(one, "base_lrs") and "initial_lr" in optimizer.param_groups[0]:
            one.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        for name in _OF_SCHEDULES:
            kept = one.__dict__.get(name)
            if isinstance(kept, list):
                setattr(one, name, [rate * factor for rate in kept])
            elif isinstance(kept, float | int):
                setattr(one, name, kept * factor)


def _with_held(schedules: Iterable[Any]) -> list[Any]:
    """``schedules`` and those that they hold, each once."""
    # SequentialLR and ChainedScheduler hold others, which may be among `schedules` too. If torch renames the attribute,
    # their rates stay.
    held = (one for schedule in schedules for one in (schedule, *getattr(schedule, "_schedulers", ())))
    return list({id(one): one for one in held}.values())


def add_knobs(optimizer: torch.optim.Optimizer) -> None:
    """Add the knobs of ``optimizer``, which wraps no other one, to the run; `renew_knobs` adds them to later runs."""
    notes = notes_of(optimizer)
    if notes.knobs_of == steering.run:
        return
    notes.knobs_of = steering.run
    options = [one for key in _LIMITS if (one := _Option(optimizer, key)).is_there]
    number = 1
    while any(one.name(number) in steering.knobs for one in options):
        number += 1
    for one in options:
        steering.add(Knob(one.name(number), Range(one.value, 0.0, _LIMITS[one.key]), one.value, one.read, one.apply))


def renew_knobs(optimizer: torch.optim.Optimizer) -> None:
    """At a step of ``optimizer``: add the knobs that it had in an earlier run, perhaps in another process."""
    if notes_of(optimizer).knobs_of is not None:
        add_knobs(optimizer)


def count_step(optimizer: torch.optim.Optimizer) -> None:
    """Note that ``optimizer``, which wraps no other one, has made a step."""
    notes_of(optimizer).steps += 1
    freed_memory.give_back_if_little_is_left()
    renew_knobs(optimizer)


class _Option:
    """One option of all groups of an optimizer. Adam's momentum is the first of its ``betas``."""

    def __init__(self, optimizer: torch.optim.Optimizer, key: str) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._last = 0.0
        self.key = key

    def name(self, number: int) -> str:
        name = "momentum" if self.key == "betas" else self.key
        return name if number == 1 else f"{name}_{number}"

    @property
    def is_there(self) -> bool:
        """Whether all groups have it as a number. SGD made with momentum 0 has none: it keeps no state for it."""
        values = [self._of(group) for group in self._groups()]
        known = all(isinstance(one, float | int) and not isinstance(one, bool) for one in values)
        kept = (group.get(_BEFORE_0, {}).get(self.key) for group in self._groups())
        return bool(values) and known and (self.key != "momentum" or any(values) or any(kept))

    @property
    def value(self) -> float:
        """Its value in the first group in which it is not 0."""
        return float(next(filter(None, map(self._of, self._groups())), 0.0))

    def read(self) -> float:
        """Its value; if the optimizer is gone, the last value that was read."""
        if self._optimizer() is not None:
            self._last = self.value
        return self._last

    def apply(self, value: Any) -> None:
        """Set it so that `value` becomes ``value``, in other groups in proportion; to ``value`` if it was always 0."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if self.key == "betas":
            for group in self._groups():
                group["betas"] = (value, *group["betas"][1:])
            return
        keys = RATES if self.key == "lr" else {self.key}
        schedules = _with_held(_schedulers_of(optimizer)) if self.key == "lr" else []
        if value and not self.value:
            self._restore(keys, schedules)
        elif self.value and not value:
            self._keep(keys, schedules)
        before = self.value
        for group in self._groups():
            for key in keys & group.keys():
                group[key] = value if group[key] == before else group[key] * (value / before) if before else group[key]
        scale_schedules(optimizer, schedules, value / before if before else 1.0)

    def _keep(self, keys: Iterable[str], schedules: Iterable[Any]) -> None:
        """Keep the values of ``keys`` in groups and schedules, before they become 0."""
        for group in self._groups():
            group.setdefault(_BEFORE_0, {}).update({key: group[key] for key in keys if key in group})
        for one in schedules:
            setattr(one, _BEFORE_0, {name: one.__dict__[name] for name in _OF_SCHEDULES if name in one.__dict__})

    def _restore(self, keys: Iterable[str], schedules: Iterable[Any]) -> None:
        """Put back what `_keep` has kept."""
        for group in self._groups():
            kept = group.get(_BEFORE_0, {})
            group.update({key: kept[key] for key in keys if key in kept})
        for one in schedules:
            one.__dict__.update(one.__dict__.get(_BEFORE_0, {}))

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        return [] if optimizer is None else optimizer.param_groups

    def _of(self, group: dict[str, Any]) -> Any:
        value = group.get(self.key)
        return value[0] if self.key == "betas" and isinstance(value, tuple | list) and value else value


def _schedulers_of(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """All schedules of ``optimizer`` or its wrapper, found by a search: not every loop passes them to `prepare`."""
    for one in gc.get_objects():
        if issubclass(type(one), LRScheduler):
            own = getattr(one, "optimizer", None)
            if own is optimizer or getattr(own, "_wrapped", None) is optimizer:
                yield one
