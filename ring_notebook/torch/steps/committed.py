"""An optimizer's step that all ranks of a process set make, or none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ring_notebook.api.process_sets import ProcessSet
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.step_guard import step_guard

__all__ = ["Undo", "all_or_none", "committed"]


def committed(process_set: ProcessSet, *others: Communicator) -> AbstractContextManager[None]:
    """The block makes a step whose reductions have succeeded: it is begun on all ranks or on none.

    Interrupts wait for its end. Operations on ``others`` in it go on for a while after an abort, as those of
    ``process_set`` do.
    """
    if not process_set.included() or process_set.size() == 1:
        return nullcontext()
    return step_guard.committed(process_set.communicator, others)


@contextmanager
def all_or_none(
    optimizer: torch.optim.Optimizer, process_set: ProcessSet, at_end: Callable[[], object]
) -> Iterator[None]:
    """The block makes a step that takes several reductions, as that of LBFGS; ``at_end`` is called when it counts.

    Where some rank does not come to its end, parameters and state of ``optimizer`` are on all ranks what they were.
    """
    if not process_set.included() or process_set.size() == 1:
        yield
        at_end()
        return
    undo, counts = Undo(optimizer), False
    try:
        yield
        with step_guard.committed(process_set.communicator):
            counts = True
            at_end()
    except BaseException:
        if not counts:
            with step_guard.holding():
                undo()
        raise


class Undo:
    """Copies of the parameters and the state of an optimizer; to call it puts them back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._values: list[tuple[Tensor, Tensor]] = [
            (parameter, parameter.detach().clone()) for group in optimizer.param_groups for parameter in group["params"]
        ]
        self._state: dict[Any, Any] = {owner: copy.deepcopy(entry) for owner, entry in optimizer.state.items()}

    @torch.no_grad()
    def __call__(self) -> None:
        for parameter, value in self._values:
            parameter.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
