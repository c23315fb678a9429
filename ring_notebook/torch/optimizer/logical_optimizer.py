"""The optimizer of logical ranks: it steps in the last turn of a round, with the average of all their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from ring_notebook.core.logical_ranks import logical_ranks
from ring_notebook.torch.optimizer.logical_reducer import LogicalReducer
from ring_notebook.torch.optimizer.reducing_optimizer import ReducingOptimizer
from ring_notebook.torch.optimizer.scalers_and_schedules import logical_optimizers
from ring_notebook.torch.optimizer.wrapper import closure_of, once, put_kept
from ring_notebook.torch_private import uncompiled

T = TypeVar("T")


class LogicalOptimizer(ReducingOptimizer):
    """Mixed into the class of the wrapped optimizer by `prepare` with ``logical``.

    In each turn the loop calls `step` once. Before the last turn it does nothing, and ``p.grad`` is zeros.
    """

    _reducer: LogicalReducer
    rest: tuple[LogicalReducer, ...] = ()

    def is_between_steps(self) -> bool:
        """Whether the next call of `step` will do nothing: the turn in progress is not the last one."""
        return self._reducer.logical.is_between

    @once
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Make the step of a round in its last turn, see `ReducingOptimizer.step`.

        Raises RuntimeError outside of turns, for a closure, and for another step in the same turn.
        """
        self._check_newest()
        self._follow_generation()
        if closure_of(args, kwargs) is not None:
            self._refuse("step(closure)", "the gradients of all logical ranks are there in the last turn only")
        if self._reducer.open("optimizer.step()").is_closed:
            self._refuse("a second step() in one turn", "it would need the gradients of turns that are to come")
        if self.is_between_steps():
            self._reducer.settle()
            self._mark_stepped()
            result = None
        else:
            result = super().step(*args, **kwargs)
        for one in (self._reducer, *self.rest):
            one.close_turn("optimizer.step()")
        return result

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's; the gradients of earlier turns of a round are kept elsewhere, and stay."""
        super().zero_grad(set_to_none)

    def accumulate(self, micro_batches: int) -> None:
        """Raises RuntimeError: use more logical ranks in place of micro-batches."""
        if micro_batches != 1:
            self._refuse("accumulate", "take more logical ranks, which add their gradients too")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Raises RuntimeError, except for 1."""
        if passes != 1:
            self._refuse("backward_passes_per_step", "take more logical ranks, which add their gradients too")

    def begin_other_step(self) -> None:
        """Raises RuntimeError: a step of another name changes the weights before the last turn."""
        self._refuse("a step of another name than step()", "it would change the weights between turns")

    def commit_other_step(self, by_name: Callable[[str], T]) -> T:
        """As `begin_other_step`."""
        self._refuse("a step of another name than step()", "it would change the weights between turns")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the base class; a copy takes turns with the logical ranks that are in use."""
        return *super().__reduce_ex__(protocol)[:-1], _put_kept

    def _refuse(self, what: str, why: str) -> NoReturn:
        rank = self._reducer.logical.rank
        raise RuntimeError(f"rank {rank}: logical ranks do not allow {what}: {why}; or leave logical out")

    def _claimed(self) -> None:
        super()._claimed()
        logical_optimizers.add(self._wrapped)


def _put_kept(wrapper: torch.optim.Optimizer, kept: tuple[dict[str, Any], Any]) -> None:
    if isinstance(wrapper, LogicalOptimizer):
        reducer: LogicalReducer = kept[0]["_reducer"]
        reducer.logical = logical_ranks(reducer.logical.number)
    put_kept(wrapper, kept)
