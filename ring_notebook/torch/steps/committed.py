"""Optimizer steps that all ranks of a process set make, or none."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ring_notebook.api.process_sets import ProcessSet
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.step_guard import step_guard


def committed(process_set: ProcessSet, *others: Communicator) -> AbstractContextManager[None]:
    """A context for a step whose reductions have succeeded: it begins on all ranks or on none.

    Interrupts wait for its end. In it, operations on ``process_set`` and ``others`` continue for a while after an
    abort.
    """
    if not process_set.included() or process_set.size() == 1:
        return nullcontext()
    return step_guard.committed(process_set.communicator, others)


@contextmanager
def all_or_none(
    optimizer: torch.optim.Optimizer,
    process_set: ProcessSet,
    at_end: Callable[[], object],
    at_commit: Callable[[Undo], object] = lambda _: None,
) -> Iterator[None]:
    """A context for a step with several reductions, like that of LBFGS; ``at_end`` is called when the step counts.

    Ranks call ``at_commit`` and commit when the step has updated the parameters, before its post hooks run. Where a
    rank does not commit, all ranks restore the parameters and the state of ``optimizer``.
    """
    if not process_set.included() or process_set.size() == 1:
        yield
        at_end()
        return
    undo, counts, depth = Undo(optimizer), False, 0

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1  # a step that calls its base class's step runs the hooks twice
        if depth == 0:
            commit()

    def commit() -> None:
        nonlocal counts
        at_commit(undo)
        step.enter_context(step_guard.committed(process_set.communicator))
        counts = True
        at_end()

    with ExitStack() as step:
        hooks = optimizer.register_step_pre_hook(enter), run_first(optimizer.register_step_post_hook(leave))
        try:
            yield
            if not counts:  # a step without torch's hooks
                commit()
        except BaseException:
            if not counts:
                with step_guard.holding():
                    undo()
            raise
        finally:
            for hook in hooks:
                hook.remove()


def run_first(hook: RemovableHandle) -> RemovableHandle:
    """Make ``hook`` run before those that were registered earlier."""
    hooks = hook.hooks_dict_ref()
    if isinstance(hooks, OrderedDict):
        hooks.move_to_end(hook.id, last=False)
    return hook


class Undo:
    """Copies of the parameters and the state of an optimizer; a call restores them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.values: list[tuple[Tensor, Tensor]] = [
            (parameter, parameter.detach().clone()) for group in optimizer.param_groups for parameter in group["params"]
        ]
        self._state: dict[Any, Any] = {owner: copy.deepcopy(entry) for owner, entry in optimizer.state.items()}

    @torch.no_grad()
    def __call__(self) -> None:
        for parameter, value in self.values:
            parameter.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
