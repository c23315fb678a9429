"""Learning rate schedules and GradScalers act once in a round of logical ranks: in its last turn, as the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ring_notebook.core.logical_ranks import current
from ring_notebook.torch.optimizer.logical_optimizer import is_logical

_DONE = "_ring_acts_once"


def act_once() -> None:
    """Have ``step`` of all schedules of a logical optimizer, and ``update`` of GradScalers, wait for the last turn.

    The classes are changed, not their objects, whose attributes are their state_dict; again for classes that a program
    has defined since.
    """
    for kind in _with_subclasses(LRScheduler):
        _change(kind, "step", _step_once)
    for kind in _with_subclasses(torch.amp.GradScaler):
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


def _update_once(update: Any) -> Any:
    @wraps(update)
    def updating(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_between() or not self.is_enabled():
            return update(self, *args, **kwargs)
        before = self.state_dict()
        result = update(self)  # so that it lets go of what it knows of this turn's gradients
        self.load_state_dict(before)
        return result

    return updating


def _with_subclasses(kind: Any) -> Iterator[type]:
    yield kind
    for one in kind.__subclasses__():
        yield from _with_subclasses(one)
