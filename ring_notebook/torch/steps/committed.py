"""An optimizer's step that all ranks of a process set make, or none."""

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
    """The block makes a step whose reductions have succeeded: it is begun on all ranks or on none.

    Interrupts wait for its end. Operations on ``others`` in it go on for a while after an abort, as those of
    ``process_set`` do.
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
    """The block makes a step that takes several reductions, as that of LBFGS; ``at_end`` is called when it counts.

    Ranks call ``at_commit`` and commit when the step has updated the parameters, before its post hooks run. Where some
    rank does not come so far, parameters and state of ``optimizer`` are on all ranks what they were.
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
        depth -= 1  # a step that calls that of its base class has hooks there too
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
            if not counts:  # a step that torch has given no hooks
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
    """Have ``hook`` run before those that have been registered earlier."""
    hooks = hook.hooks_dict_ref()
    if isinstance(hooks, OrderedDict):
        hooks.move_to_end(hook.id, last=False)
    return hook


class Undo:
    """Copies of the parameters and the state of an optimizer; to call it puts them back."""

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
