"""The optimizer that reduces gradients in buckets and then makes the step of the wrapped optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ring_notebook.api.arguments import check_passes
from ring_notebook.core import world
from ring_notebook.torch.optimizer.gradient_reducer import GradientReducer
from ring_notebook.torch.optimizer.local_optimizer import LocalOptimizer
from ring_notebook.torch.optimizer.wrapper import Wrapper, average_loss, once, owners_of
from ring_notebook.torch.steps.committed import all_or_none, committed
from ring_notebook.torch.steps.optimizer_notes import count_step
from ring_notebook.torch.steps.repair import Shared


class ReducingOptimizer(Wrapper):
    """Mixed into the class of the wrapped optimizer by `DistributedOptimizer`."""

    _reducer: GradientReducer
    _skipping = False
    _synchronized = False
    _warned = False
    _step_keeps_gradients = False  # clip_grad_norm_ has already reduced them
    _left_out = False  # skip this step: its gradients are older than the weights
    _doubts = 0  # `world.doubts` at the last step

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes whose gradients are added up before they are reduced."""
        return self._reducer.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are added up before they are reduced."""
        self._reducer.passes = check_passes(passes)

    def accumulate(self, micro_batches: int) -> None:
        """Make one step in every ``micro_batches`` calls of `step`, see `Wrapper.accumulate`."""
        super().accumulate(micro_batches)
        self._reducer.average_over(micro_batches)

    def reduce_for_clipping(self) -> bool:
        """Reduce the gradients before the next `step`; if that step will only count, return True and do nothing."""
        if self._is_between_steps():
            return True
        if not self._step_keeps_gradients:
            self.synchronize()
            self._synchronized, self._step_keeps_gradients = False, True
        return False

    def synchronize(self) -> None:
        """Replace every gradient by its reduction over all ranks; all ranks must call this.

        For changes between reduction and step, such as clipping: ``synchronize()``, clip, then ``step()`` within
        `skip_synchronize`.
        """
        self._check_newest()
        self._follow_epoch()
        self._synchronized = True
        if self._mend(self._reducer.how.process_set, self._shared):
            self._reducer.reset()
            self._left_out = True
            return
        self._reduce()

    def _reduce(self) -> None:
        self._reducer.synchronize(
            [
                (self._parameter_names.get(p) or f"group {g} parameter {i}", p)
                for g, group in enumerate(self.param_groups)
                for i, p in enumerate(group["params"])
            ]
        )

    def _shared(self) -> Shared:
        return Shared(self._wrapped, self._parameter_names, self._reducer.how.process_set)

    def _follow_epoch(self) -> None:
        """Drop a step that was under way when an epoch was aborted: the ranks may have begun different parts of it."""
        doubts = world.doubts()
        if doubts > self._doubts:
            self._synchronized = self._step_keeps_gradients = self._left_out = self._skipping = False
            self._seen = 0
        self._doubts = doubts

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which ``step()`` does not reduce, because `synchronize` has done it."""
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which gradients of backward passes only add up; the first pass after it sends their sum."""
        return self._reducer.paused()

    @once
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients and make a step of the wrapped optimizer.

        With a ``closure`` the gradients are reduced after each of its calls, and its loss is averaged over all ranks:
        an optimizer that searches with it then decides the same on every rank.
        """
        self._check_newest()
        self._follow_epoch()
        if self._is_between_steps() and closure is None:
            self._seen += 1
            self._mark_stepped()  # a scheduler that steps after every batch is in the right order
            return None
        process_set = self._reducer.how.process_set
        keeps = self._skipping or self._step_keeps_gradients
        if hasattr(self, "found_inf") and closure is None:
            return self._step_for_scaler(keeps)
        if closure is not None:
            self._mend(process_set, self._shared)
            with all_or_none(self, process_set, self._end_step):
                return super().step(closure if keeps else self._reducing(closure))
        if not keeps:
            if self._synchronized and not self._warned:
                self._warned = True
                warnings.warn(
                    "step() after synchronize() reduces the gradients a second time; call it within "
                    "optimizer.skip_synchronize()",
                    stacklevel=2,
                )
            self.synchronize()
        with committed(process_set):
            result = None if self._left_out else super().step()
            self._end_step()
        return result

    def _end_step(self) -> None:
        """Count a step that all ranks make."""
        if not self._left_out:
            count_step(self._wrapped)
        self._synchronized = self._step_keeps_gradients = self._left_out = False
        self._seen = 0
        self._mark_stepped()

    def _step_for_scaler(self, keeps: bool) -> Any:
        """A step that a GradScaler calls: unscale, reduce, and update unless some rank has an inf.

        ``keeps``: the gradients are already reduced.
        """
        if not keeps:
            if self._reducer.pending():
                raise RuntimeError(
                    "scaled gradients are already being reduced: this is the first step with a GradScaler, in the "
                    "middle of a training. For this one step call optimizer.synchronize(), and scaler.step(optimizer) "
                    "within optimizer.skip_synchronize()"
                )
            self._reducer.waits_for_step = True
        process_set = self._reducer.how.process_set
        with self._unscaled(process_set) as overflowed:
            if not keeps:
                self.synchronize()  # also after an overflow, so that all ranks end the round
            overflow = overflowed()
            with committed(process_set):
                result = None if overflow or self._left_out else super().step()
                self._end_step()
        return result

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reducing() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._reduce()
            return average_loss(loss, self._reducer.how.process_set)

        return reducing

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's. Waits for gradients that are being reduced, and drops them.

        Between `backward` and `step` all ranks must call this, for example in a GAN, where the backward pass of the
        generator's loss makes gradients of the discriminator. ``RING_OVERLAP=inline`` reduces nothing before `step`.
        """
        self._follow_epoch()
        if self._seen:
            return  # gradients of micro-batches add up
        self._step_keeps_gradients = False
        self._reducer.drop_round()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped optimizer's; drops gradients of the current step."""
        self._reducer.forget_round()
        self._synchronized = self._step_keeps_gradients = False
        self._seen = 0
        super().load_state_dict(state_dict)

    def _release(self) -> None:
        super()._release()
        self._reducer.close()


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` on reduced gradients, in place; all ranks call it. Beyond Horovod.

    Between ``backward()`` and ``step()`` gradients are this rank's own: torch's function would clip each rank by its
    own norm. This one first reduces the gradients of every `DistributedOptimizer` that has one of ``parameters``; its
    next ``step()`` does not reduce them again. Returns the norm before clipping, the same on every rank. Between the
    steps of accumulated micro-batches (``prepare(accumulate=...)``) it clips nothing. With local steps (``sync_every``)
    each rank clips its own gradients. DistributedDataParallel and FSDP2 have already reduced their gradients. Raises
    TypeError for optimizers with ``fused=True`` or ``op=Adasum``, which reduce within their step.
    """
    chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    between = False
    for owner in owners_of(chosen):
        if isinstance(owner, LocalOptimizer):  # whose gradients are this rank's own
            between = owner._is_between_steps() or between
            continue
        if not isinstance(owner, ReducingOptimizer):
            raise TypeError(
                "clip_grad_norm_ needs the reduced gradients, and an optimizer with fused=True or op=Adasum has none "
                "before its step; leave fused and Adasum out"
            )
        between = owner.reduce_for_clipping() or between
    if between:
        return torch.nn.utils.get_total_norm([p.grad for p in chosen if p.grad is not None], norm_type)
    return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite, foreach)
