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
from ring_notebook.core import world
from ring_notebook.core.step_guard import COMMIT, step_guard


def committed(process_set: ProcessSet, *, name: str = COMMIT) -> AbstractContextManager[None]:
    """A context for a step whose reductions have succeeded: it begins on all ranks or on none.

    Interrupts wait for its end. Raises CollectiveMismatch if the ranks' names differ.
    """
    if not process_set.included() or process_set.size() == 1:
        return _ALONE if process_set.included() and world.spans(process_set.communicator) else nullcontext()
    return step_guard.committed(process_set.communicator, name)


class _Alone:
    """A step of the only rank: it takes changes of knobs without a commit."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            step_guard.alone()


_ALONE = _Alone()


@contextmanager
def all_or_none(
    optimizer: torch.optim.Optimizer,
    process_set: ProcessSet,
    at_end: Callable[[], object],
    at_commit: Callable[[Undo], object] = lambda _: None,
    commit_to: Callable[[ProcessSet], AbstractContextManager[None]] = committed,
) -> Iterator[None]:
    """A context for a step with several reductions, such as LBFGS's; ``at_end`` is called when the step counts.

    When the step has updated the parameters, before its post hooks, ranks call ``at_commit`` and commit by
    ``commit_to``. If a rank does not commit, all ranks restore the parameters and the state of ``optimizer``.
    """
    if not process_set.included() or process_set.size() == 1:
        with committed(process_set):
            yield
            at_end()
        return
    with ExitStack() as step:

        def commit(undo: Undo) -> None:
            at_commit(undo)
            step.enter_context(commit_to(process_set))
            at_end()

        undo = Undo(optimizer, commit)
        try:
            yield
            undo.commit()  # after a step without torch's hooks
        except BaseException:
            undo()
            raise


_open: list[Undo] = []
"""The `Undo` of steps that have begun, and neither count nor are undone yet."""


class Undo:
    """Copies of the parameters, state and options of an optimizer; a call restores them, unless the step counts.

    At the end of the step, before its other hooks, ranks call ``commit``, which raises if they do not commit. If an
    interrupt keeps a failed step from being undone, it is undone when this rank leaves the generation. The hooks stay
    with the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, commit: Callable[[Undo], object]) -> None:
        for earlier in _open_of(optimizer):
            earlier()
        self._optimizer, self._commit = optimizer, commit
        self._depth = 0  # a step that calls its base class's step runs the hooks twice
        self.values: list[tuple[Tensor, Tensor]] = [
            (parameter, parameter.detach().clone()) for group in optimizer.param_groups for parameter in group["params"]
        ]
        self._state: dict[Any, Any] = {owner: copy.deepcopy(entry) for owner, entry in optimizer.state.items()}
        self._options = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        _only_and_first(optimizer.register_step_pre_hook(_enter))
        _only_and_first(optimizer.register_step_post_hook(_leave))
        world.at_close(_undo_all)
        _open.append(self)

    def commit(self) -> None:
        """Commit to the step, or restore; does nothing after the first call."""
        if self not in _open:
            return
        try:
            self._commit(self)
        except BaseException:
            self()
            raise
        _open.remove(self)

    def __call__(self) -> None:
        """Restore, unless the step is already undone or counts. Interrupts wait for it."""
        if self not in _open:
            return
        with step_guard.holding(), torch.no_grad():
            for parameter, value in self.values:
                parameter.copy_(value)
            self._optimizer.state.clear()
            self._optimizer.state.update(self._state)
            for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
                group.update(options)
            _open.remove(self)


def _enter(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for undo in _open_of(optimizer):
        undo._depth += 1


def _leave(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for undo in _open_of(optimizer):
        undo._depth -= 1
        if undo._depth == 0:
            undo.commit()


def _open_of(optimizer: torch.optim.Optimizer) -> list[Undo]:
    return [undo for undo in _open if undo._optimizer is optimizer]


def _undo_all() -> None:
    for undo in reversed(_open.copy()):
        undo()


def _only_and_first(hook: RemovableHandle) -> None:
    """Make ``hook`` run before all others, and remove its earlier registrations."""
    hooks = hook.hooks_dict_ref()
    assert isinstance(hooks, OrderedDict)
    for number in [number for number, other in hooks.items() if other is hooks[hook.id] and number != hook.id]:
        del hooks[number]
    hooks.move_to_end(hook.id, last=False)
