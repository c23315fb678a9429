"""GradScalers, and schedules of logical ranks, act once in a step: with its last micro-batch or turn.

The gradients of one step are made at one scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.lr_scheduler import LRScheduler

from ring_notebook.core.logical_ranks import current

_DONE = "_ring_acts_once"
logical_optimizers: WeakSet[Any] = WeakSet()
"""The optimizers that are wrapped for logical ranks."""
_scaled: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()
"""The optimizers that each GradScaler has stepped since its last update."""


def is_logical(optimizer: Any) -> bool:
    """Whether ``optimizer``, or one that wraps it, makes its steps in the last turn of a round."""
    is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
    return is_optimizer and getattr(optimizer, "_wrapped", optimizer) in logical_optimizers


def act_once() -> None:
    """Have ``step`` of a logical optimizer's schedules, and ``update`` of GradScalers, wait for the optimizer's step.

    Patches the classes, because attributes of the objects would get into their state_dict. Call it again for classes
    that a program has defined since.
    """
    for kind in _with_subclasses(LRScheduler):
        _change(kind, "step", _step_once)
    for kind in _with_subclasses(torch.amp.GradScaler):
        _change(kind, "step", _noted)
        _change(kind, "update", _update_once)


def _change(kind: type, name: str, by: Callable[[Any], Any]) -> None:
    method = vars(kind).get(name)
    if method is not None and not getattr(method, _DONE, False):
        changed = by(method)
        setattr(changed, _DONE, True)
        setattr(kind, name, changed)


def _is_between() -> bool:
    logical = current()
    return logical is not None and logical.is_between


def _step_once(step: Any) -> Any:
    @wraps(step)
    def stepping(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_between() and is_logical(getattr(self, "optimizer", None)):
            return None
        return step(self, *args, **kwargs)

    return stepping


def _noted(step: Any) -> Any:
    @wraps(step)
    def stepping(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        _scaled.setdefault(self, WeakSet()).add(optimizer)
        return step(self, optimizer, *args, **kwargs)

    return stepping


def _update_once(update: Any) -> Any:
    @wraps(update)
    def updating(self: Any, *args: Any, **kwargs: Any) -> Any:
        waits = any(getattr(one, "has_begun_step", False) for one in _scaled.pop(self, ()))
        if not (waits or _is_between()) or not self.is_enabled():
            return update(self, *args, **kwargs)
        before = self.state_dict()
        result = update(self)  # it forgets its records of these gradients
        self.load_state_dict(before)
        return result

    return updating


def _with_subclasses(kind: Any) -> Iterator[type]:
    yield kind
    for one in kind.__subclasses__():
        yield from _with_subclasses(one)
