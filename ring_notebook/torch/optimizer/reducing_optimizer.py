"""The optimizer whose gradients are averages when `backward` returns, and whose steps all ranks make or none."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ring_notebook.api.arguments import check_passes
from ring_notebook.api.process_sets import ProcessSet
from ring_notebook.core import world
from ring_notebook.torch.optimizer.gradient_reducer import GradientReducer
from ring_notebook.torch.optimizer.local_optimizer import LocalOptimizer
from ring_notebook.torch.optimizer.wrapper import (
    Wrapper,
    average_loss,
    closure_of,
    once,
    owners_of,
    parameters_of,
    with_closure,
)
from ring_notebook.torch.steps.optimizer_knobs import count_step
from ring_notebook.torch.steps.repair import Shared
from ring_notebook.torch.steps.step_commit import all_or_none
from ring_notebook.torch_private import uncompiled

T = TypeVar("T")


class ReducingOptimizer(Wrapper):
    """Mixed into the class of the wrapped optimizer by `DistributedOptimizer`."""

    _reducer: GradientReducer
    rest: Sequence[GradientReducer] = ()
    """Reducers for parameters of its models that no optimizer has."""
    _newer: tuple[ReducingOptimizer, ...] = ()
    """Optimizers that share some of its parameters, and reduce their gradients."""
    _shares = False
    """Whether another optimizer, older or newer, has some of its parameters too."""
    _skipping = False
    _synchronized = False  # the user called `synchronize` before this step, needlessly
    _warned = False
    _disruptions = 0  # `world.disruptions` at the last step

    @property
    def process_set_of_steps(self) -> ProcessSet:
        """The ranks that make steps of any name together, or none does."""
        return self._reducer.how.process_set

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes whose gradients are added up before they are reduced."""
        return self._reducer.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are added up before they are reduced."""
        for one in self._own_reducers():
            one.passes = check_passes(passes)

    def _own_reducers(self) -> Sequence[GradientReducer]:
        return self._reducer, *self.rest

    def settle(self) -> bool:
        """Reduce gradients that no backward pass has reduced; if the next `step` only counts, just return True."""
        if self.is_between_steps():
            return True
        self.synchronize()
        self._synchronized = False
        return False

    def synchronize(self) -> None:
        """Replace gradients by their reduction over all ranks; all ranks must call this (Horovod's name).

        `backward` has already done that, so only gradients that the program has set itself are reduced.
        """
        self._check_newest()
        self._follow_generation()
        was_late = self._settle_all()
        self._synchronized = not was_late
        for one in self.rest:
            one.settle()

    def _compare(self) -> bool:
        """`_mend`, at the begin of a step; returns whether the step is skipped, because its gradients are dropped."""
        if not self._mend(self._reducer.how.process_set, self._shared):
            return False
        self._seen = 0
        for one in self._reducers():
            one.reset()
        return True

    def named_gradients(self) -> Sequence[tuple[str, Tensor]]:
        """The parameters, with names, whose gradients it reduces: no newer optimizer has them."""
        named = super().named_gradients()
        return [pair for pair in named if owners_of([pair[1]]) == [self]] if self._newer else named

    def _reducers(self) -> list[GradientReducer]:
        """The reducers of its parameters' gradients."""
        if not self._newer:
            return [self._reducer]
        owners: list[Any] = owners_of(parameters_of(self))
        if any(one._micro_batches != 1 for one in (self, *owners)):
            raise RuntimeError(
                f"rank {world.current().rank}: accumulate needs an optimizer that shares no parameter with another "
                "one; call backward() several times before step() instead"
            )
        return [one._reducer for one in owners]

    def _settle_all(self) -> bool:
        were_late = [one.settle() for one in self._reducers()]
        return any(were_late)

    def _shared(self) -> Shared:
        return Shared(self._wrapped, self._parameter_names, self._reducer.how.process_set)

    def _follow_generation(self) -> None:
        """Drop a step that was under way when a generation was aborted: ranks may have begun different parts of it."""
        disruptions = world.disruptions()
        if disruptions > self._disruptions:
            self._synchronized = self._skipping = False
            self._seen = 0
        self._disruptions = disruptions

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which ``step()`` does not reduce, because `synchronize` has done it (Horovod's name)."""
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients of backward passes only add up; the first pass after it reduces their sum."""
        with ExitStack() as stack:
            for one in self._reducers():
                stack.enter_context(one.paused())
            yield

    @once
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step of the wrapped optimizer, with its arguments; all ranks make it or none.

        Reduces gradients that no backward pass has reduced. With a ``closure`` its loss is averaged over all ranks: an
        optimizer that searches with it then decides the same on every rank.
        """
        self._check_newest()
        self._follow_generation()
        closure = closure_of(args, kwargs)
        if self._only_counts(closure):
            return None
        process_set = self._reducer.how.process_set
        if closure is not None:
            self._mend(process_set, self._shared)
            args, kwargs = with_closure(args, kwargs, self._reducing(closure))
            with self._own_step(), all_or_none(self, process_set, self._end_step, commit_to=self._committed):
                return super().step(*args, **kwargs)
        if self._synchronized and not self._skipping and not self._warned:
            self._warned = True
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "Here that is harmless: gradients that are reduced are not reduced again. backward() has reduced them, "
                "so neither of the two is needed",
                stacklevel=2,
            )
        with self._unscaled() as overflowed:
            late = not self._skipping and self._settle_all()
            is_left_out = overflowed(process_set if late else None)
            if self._compare():
                return self._mark_stepped()
            with self._own_step(), self._committed(process_set, None if late else self._scale):
                for one in (*self._reducers(), *self.rest):
                    one.drop_micro_batches()
                result = None if is_left_out else super().step(*args, **kwargs)
                self._end_step()
        return result

    def _end_step(self) -> None:
        """Count a step that all ranks make."""
        count_step(self._wrapped)
        self._synchronized = False
        self._seen = 0
        for one in (*self._reducers(), *self.rest):
            one.end_step(self._shares)
        self._mark_stepped()

    def begin_other_step(self) -> None:
        """Prepare, as `step` does, a step in another method, or by another optimizer of the parameters."""
        self._refuse_in_micro_batches("a step of another name than step()")
        self._check_newest()
        self._follow_generation()
        self._settle_all()
        self._compare()

    def commit_other_step(self, by_name: Callable[[str], T]) -> T:
        """Commit to that step, by a call of ``by_name``."""
        return self.same_step.commit(self._reducer.how.process_set, self.named_gradients, by_name)

    def end_other_step(self) -> None:
        """Count that step."""
        self._end_step()

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reducing() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._settle_all()
            return average_loss(loss, self._reducer.how.process_set)

        return reducing

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's; micro-batches stay for which `step` was already called."""
        self._follow_generation()
        if world.is_initialized():
            for one in self._reducers():
                one.forget()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped optimizer's; drops earlier micro-batches of the step, and compression errors."""
        self._reducer.drop_micro_batches()
        self._reducer.drop_residuals()
        self._seen = 0
        super().load_state_dict(state_dict)

    def _claimed(self) -> None:
        super()._claimed()
        self._disruptions = world.disruptions()
        self._reducer.watch(self)

    def _release(self, to: Wrapper) -> None:
        """Continue if ``to`` reduces in the same way: either may then average for both."""
        if (
            isinstance(to, ReducingOptimizer)
            and to._wrapped is not self._wrapped
            and self._reducer.reduces_as(to._reducer)
        ):
            self._newer = (*self._newer, to)  # which must live as long as this one
            self._shares = to._shares = True
            self._reducer.watch(self)
        else:
            super()._release(to)
            self._reducer.close()


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` on reduced gradients, in place; all ranks call it. Beyond Horovod.

    After ``backward()`` gradients are averages, so torch's own function does the same. This one first reduces those
    that no backward pass has reduced, which a program has set itself. Returns the norm before clipping, the same on
    every rank. Between the steps of accumulated micro-batches (``prepare(accumulate=...)``) it clips nothing. With
    local steps (``sync_every``) each rank clips its own gradients. Raises TypeError for optimizers with ``op=Adasum``,
    which combine the ranks' steps.
    """
    chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    between = False
    for owner in owners_of(chosen):
        if isinstance(owner, LocalOptimizer):  # its gradients are this rank's own
            between = owner.is_between_steps() or between
            continue
        if not isinstance(owner, ReducingOptimizer):
            raise TypeError(
                "clip_grad_norm_ needs reduced gradients, and an optimizer with op=Adasum has none; leave Adasum out"
            )
        between = owner.settle() or between
    if between:
        return torch.nn.utils.get_total_norm([p.grad for p in chosen if p.grad is not None], norm_type)
    return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite, foreach)
