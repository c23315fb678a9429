"""Reduces the gradients of an optimizer's parameters over a group, in rounds.

A round goes from the first gradient after a `synchronize` to the next `synchronize`:

1. A hook marks each gradient as ready as soon as autograd has it.
2. Full buckets are reduced: during backward on the progress thread, as they become full, or in `synchronize`. During
   backward they match by name: ranks may fill them in different orders, and leave some out. In CPU memory the gradients
   are reduced in place; a copy into one buffer costs more than it saves. On a device the reduction is queued on another
   stream than backward's, and the host waits for neither.
3. `synchronize` reduces the remaining buckets, with zeros for gradients that this rank does not have, and waits.

In the first round of a plan the hooks do nothing: only in `synchronize`, which all ranks call, they agree on the plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ring_notebook.api.arguments import Reduction
from ring_notebook.api.basics import joins
from ring_notebook.api.bucket_plan import ParameterSpec, agree_on_plan, agree_on_sparse, plan_buckets
from ring_notebook.api.noise_meter import NoiseMeter
from ring_notebook.config import config
from ring_notebook.core.communicator import Communicator
from ring_notebook.torch.collectives.sparse_allreduce import sparse_allreduce_async, sparse_gradient
from ring_notebook.torch.compression import Compressor
from ring_notebook.torch.free_cores import reduces_beside_backward
from ring_notebook.torch.optimizer.bucket_runtime import Bucket
from ring_notebook.torch.tensors import dtype_of, multiply_each

Named = Sequence[tuple[str, Tensor]]


@dataclass(slots=True)
class _Layout:
    """A plan, bound to the communicator whose ranks agreed on it.

    Ranks that had joined did not take part, so it does not outlive a `join`.
    """

    communicator: weakref.ref[Communicator]
    threaded: bool
    joins: int = field(default_factory=joins)
    buckets: list[Bucket] = field(default_factory=list)
    sparse: list[tuple[str, Tensor]] = field(default_factory=list)
    places: dict[Tensor, tuple[Bucket, int] | None] = field(default_factory=dict)  # None: sparse


class GradientReducer:
    """The rounds of one optimizer. ``groups`` maps parameters to lists of indices that are reduced together."""

    def __init__(
        self,
        how: Reduction,
        compression: Compressor,
        groups: Callable[[Sequence[Tensor]], list[list[int]]],
        sparse_as_dense: bool,
        passes: int,
    ) -> None:
        self.passes = passes
        self._share = 1.0  # weight of the gradients of one pass in their sum
        self.waits_for_step = False  # gradients must be changed before they are reduced
        self.meter: NoiseMeter | None = None
        self.batch_size: float | None = None  # samples of this rank in a backward pass, where it is known
        # Sums of squares of the round's gradients, a number for each bucket: before and after the reduction.
        self._here: list[Tensor] = []
        self._reduced: list[Tensor] = []
        self._passes: dict[Tensor, int] = {}  # backward passes of the round that have reached a parameter
        self.how = how
        self._compression = compression
        self._groups = groups
        self._sparse_as_dense = sparse_as_dense
        self._layout: _Layout | None = None
        self._fired: dict[Tensor, int] = {}
        self._paused = False
        self._hooks: dict[Tensor, RemovableHandle] = {}
        weakref.finalize(self, _remove, self._hooks)

    def made_with(self) -> tuple[Any, ...]:
        """The arguments with which another process makes one like it."""
        return self.how, self._compression, self._groups, self._sparse_as_dense, self.passes

    def kept(self) -> dict[str, Any]:
        """The attributes that such a one needs besides; a round in progress is none of them."""
        return {"_share": self._share, "meter": self.meter, "batch_size": self.batch_size}

    def average_over(self, passes: int) -> None:
        """From the next round on, reduce the mean of the gradients of ``passes`` backward passes."""
        how, before = self.how, self._share
        self.passes, self._share = passes, 1.0 / passes
        self.how = how._replace(prescale=how.prescale / before * self._share)
        self.reset()

    def close(self) -> None:
        """Remove the hooks: another reducer has taken over the parameters."""
        self._layout = None
        _remove(self._hooks)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which new gradients are only added to ``p.grad``."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def pending(self) -> bool:
        """Whether buckets are being reduced during backward."""
        return self._layout is not None and any(bucket.started for bucket in self._layout.buckets)

    def drop_round(self) -> None:
        """Wait for reductions during backward, and drop the round and its gradients.

        All ranks of the group that have begun a round must call this: where one of them has sent a bucket, all ranks
        send all buckets, because a rank cannot cancel a reduction that others wait for.
        """
        layout = self._layout
        if layout is None or not layout.threaded or not any(bucket.touched for bucket in layout.buckets):
            return
        if self.waits_for_step or not self._holds(layout):
            self.forget_round()
            return
        try:
            self._reduce_buckets(layout)
        except BaseException:
            self.reset()
            raise
        self._forget_round()
        for bucket in layout.buckets:
            bucket.reset()
        if any(bucket.turned_sparse for bucket in layout.buckets):
            self._layout = None

    def reset(self) -> None:
        """Drop the round and the plan, but keep the gradients; the next `synchronize` makes a new plan."""
        self._layout = None
        self._forget_round()

    def forget_round(self) -> None:
        """Forget which gradients are ready, but keep the gradients.

        Also keeps the plan, because other ranks may keep theirs, unless some of its buckets are being reduced.
        """
        if self.pending():
            self.reset()
        elif self._layout is not None:
            for bucket in self._layout.buckets:
                bucket.reset()
        self._forget_round()

    def _forget_round(self) -> None:
        self._fired.clear()
        self._passes.clear()
        self._here, self._reduced = [], []

    def synchronize(self, named: Named) -> None:
        """Replace the gradients of ``named`` parameters by their reduction; all ranks of the group must call this."""
        process_set = self.how.process_set
        if not process_set.included() or process_set.size() == 1:
            if self._share != 1.0:
                multiply_each([p.grad for _, p in named if p.grad is not None], self._share)
            return
        trainable = [(name, p) for name, p in named if p.requires_grad]
        if self._layout is not None and not self._holds(self._layout):
            self._layout = None
        try:
            layout = self._layout = self._layout or self._plan(trainable)
            self._reduce(layout)
            late = [(name, p) for name, p in trainable if p not in layout.places]
            if late:
                self._reduce(self._plan(late))
        except BaseException:
            self.reset()
            raise
        if self.meter is not None:
            self.meter.end_round(
                _total(self._here), _total(self._reduced), max(self._passes.values(), default=0), self.how
            )
        self._forget_round()
        if late or len(trainable) != len(layout.places) or any(bucket.turned_sparse for bucket in layout.buckets):
            # Parameters were added, frozen or unfrozen: make a new plan, so that frozen ones cost nothing.
            self._layout = None

    def _holds(self, layout: _Layout) -> bool:
        """Whether all ranks still have this plan."""
        return layout.communicator() is self.how.process_set.communicator and layout.joins == joins()

    def _plan(self, trainable: Named) -> _Layout:
        """Agree with the other ranks how to reduce ``trainable``, and add the missing hooks."""
        parameters = [p for _, p in trainable]
        process_set = self.how.process_set
        communicator = process_set.communicator
        specs = [ParameterSpec(name, tuple(p.shape), dtype_of(p)) for name, p in trainable]
        sparse_here = [p.grad is not None and p.grad.is_sparse and not self._sparse_as_dense for p in parameters]
        division = (config().fusion_threshold, self._groups(parameters))
        threaded, mark = agree_on_plan(
            specs, division, reduces_beside_backward(any(not parameter.is_cpu for parameter in parameters)), process_set
        )
        sparse = agree_on_sparse(sparse_here, process_set)
        layout = _Layout(weakref.ref(communicator), threaded)
        layout.sparse = [pair for pair, is_sparse in zip(trainable, sparse, strict=True) if is_sparse]
        layout.places = {p: None for _, p in layout.sparse}
        dense = [index for index, is_sparse in enumerate(sparse) if not is_sparse]
        chosen = [parameters[index] for index in dense]
        plans = plan_buckets([specs[index] for index in dense], config().fusion_threshold, self._groups(chosen))
        for number, plan in enumerate(plans):
            members = [chosen[index] for index in plan.parameters]
            name = f"gradients {mark}, bucket {number}"
            bucket = Bucket(members, name, self.how, self._compression, self._sparse_as_dense)
            layout.buckets.append(bucket)
            layout.places.update({p: (bucket, position) for position, p in enumerate(members)})
        for parameter in parameters:
            if parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _hook(weakref.ref(self))
                )
        return layout

    def _on_gradient(self, parameter: Tensor) -> None:
        if self.meter is not None:
            self._passes[parameter] = self._passes.get(parameter, 0) + 1
        layout = self._layout
        if layout is None or self._paused:
            return
        fired = self._fired[parameter] = self._fired.get(parameter, 0) + 1
        place = layout.places.get(parameter)
        if fired < self.passes or place is None:
            return
        bucket, position = place
        if bucket.started:
            raise RuntimeError(
                f"rank {self.how.process_set.rank()}: backward made a gradient again after its bucket was sent; call "
                f"step() after each {self.passes} backward passes, or accumulate with backward_passes_per_step or "
                "within optimizer.no_sync()"
            )
        bucket.mark_ready(position)
        if layout.threaded and bucket.full and not self.waits_for_step and self._holds(layout):
            self._start(bucket, blocking=False)

    def _measuring(self) -> bool:
        return self.meter is not None and self.meter.wanted

    def _start(self, bucket: Bucket, *, blocking: bool) -> None:
        if self._measuring():
            self._here.append(bucket.square())
        bucket.start(blocking=blocking)

    def _reduce(self, layout: _Layout) -> None:
        """Reduce the remaining buckets of a round."""
        self._reduce_buckets(layout)
        process_set = self.how.process_set
        for bucket in layout.buckets:
            if bucket.turned_sparse:
                bucket.make_sparse(agree_on_sparse(bucket.sparse, process_set))
        results = [
            sparse_allreduce_async(sparse_gradient(p), name, self.how.op, process_set) for name, p in layout.sparse
        ]
        for (_, parameter), result in zip(layout.sparse, results, strict=True):
            grad = result()
            if parameter.grad is not None or grad.coalesce().indices().numel():
                parameter.grad = grad

    def _reduce_buckets(self, layout: _Layout) -> None:
        for bucket in layout.buckets:
            if not bucket.started:
                bucket.make_dense()
                self._start(bucket, blocking=not layout.threaded)
        for bucket in layout.buckets:
            bucket.finish()
            if self._measuring():
                self._reduced.append(bucket.square())


def _total(squares: Sequence[Tensor]) -> float:
    """The sum of ``squares``. Waits for their device."""
    return sum(float(square) for square in squares)


def _remove(hooks: dict[Tensor, RemovableHandle]) -> None:
    while hooks:
        hooks.popitem()[1].remove()


def _hook(reducer: weakref.ref[GradientReducer]) -> Callable[[Tensor], None]:
    """A hook that does not keep its reducer alive."""

    def on_gradient(parameter: Tensor) -> None:
        listening = reducer()
        if listening is not None:
            listening._on_gradient(parameter)

    return on_gradient
