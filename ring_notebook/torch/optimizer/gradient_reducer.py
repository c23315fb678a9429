"""Reduces the gradients of an optimizer's parameters over ranks, during and at the end of each backward pass.

1. A hook notes each gradient as soon as autograd has it.
2. Full buckets are reduced: during backward on the progress thread, as they become full, or at the end of the pass.
   During backward they match by name: ranks may fill them in different orders, and leave some out. In CPU memory the
   gradients are reduced in place; a copy into one buffer costs more than it saves. On a device the reduction is queued
   on another stream than backward's, and the host waits for neither.
3. At the end of the pass, see `backward_end`, `reduce` reduces the remaining buckets that some rank's pass has
   reached, with zeros for gradients that this rank does not have, and waits.

The average of equal gradients changes nothing, so any number of passes may reduce the same gradients. A reduction that
multiplies equal gradients, such as Sum, is undone before another pass adds to them.

Before there is a plan the hooks reduce nothing: at the end of that pass the ranks agree on one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from ring_notebook.api.arguments import Reduction
from ring_notebook.api.basics import joins
from ring_notebook.api.bucket_plan import ParameterSpec, agree_on_plan, agree_on_sparse, plan_buckets
from ring_notebook.api.noise_meter import NoiseMeter
from ring_notebook.api.objects import allreduce_numbers
from ring_notebook.api.process_sets import ProcessSet
from ring_notebook.config import config
from ring_notebook.core import world
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.torch.collectives.sparse_allreduce import sparse_allreduce_async, sparse_gradient
from ring_notebook.torch.compression import AutoCompression, Compression, Compressor, GradientCompression
from ring_notebook.torch.free_cores import reduces_beside_backward
from ring_notebook.torch.optimizer import backward_end
from ring_notebook.torch.optimizer.bucket import Bucket
from ring_notebook.torch.optimizer.compressed_gradients import MOST, Residuals, averager_of, spans_hosts
from ring_notebook.torch.optimizer.link_choice import LinkChoice
from ring_notebook.torch.tensors import dtype_of, multiply_each, real_view
from ring_notebook.torch_private import uncompiled

Named = Sequence[tuple[str, Tensor]]
_STEPPED = "_ring_stepped"
"""Attribute of a reduced gradient: its version when one of several optimizers that share it has stepped."""
_IS_MULTIPLIED = "_ring_is_multiplied"
"""Attribute of a gradient that a reduction has multiplied; gradients that a program sets lack it."""


class Owner(Protocol):
    """Has the parameters: an optimizer, or the `Rest` of a model, whose parameters no optimizer has."""

    def named_gradients(self) -> Named:
        """The parameters with their names, in an order that is equal on all ranks."""

    def is_between_steps(self) -> bool:
        """Whether the present micro-batch is not the last one of a step."""


@dataclass(frozen=True)
class Grouping:
    """Divides parameters into lists of indices, each reduced together: ``number`` equal parts, or ``groups``."""

    number: int
    groups: Sequence[Sequence[Tensor]] | None = None
    """The parameters themselves, because their ids change in a copy."""

    def __call__(self, parameters: Sequence[Tensor]) -> list[list[int]]:
        if self.groups is not None:
            return [[i for i, p in enumerate(parameters) if id(p) in set(map(id, group))] for group in self.groups]
        base, extra = divmod(len(parameters), self.number) if self.number else (0, 0)
        indices = iter(range(len(parameters)))
        return [[next(indices) for _ in range(base + (number < extra))] for number in range(self.number)]


@dataclass(slots=True)
class _Layout:
    """A plan, for the communicator whose ranks agreed on it. It ends with a `join`: joined ranks did not agree."""

    communicator: weakref.ref[Communicator]
    threaded: bool
    joins: int = field(default_factory=joins)
    buckets: list[Bucket] = field(default_factory=list)
    sparse: list[tuple[str, Tensor]] = field(default_factory=list)
    places: dict[Tensor, tuple[Bucket, int] | None] = field(default_factory=dict)  # None: sparse
    names: dict[Bucket, tuple[str, ...]] = field(default_factory=dict)
    started: list[Bucket] = field(default_factory=list)  # during the present pass


class GradientReducer:
    """Reduces the gradients of one owner."""

    sends_early = True

    def __init__(
        self,
        how: Reduction,
        compression: Compressor,
        groups: Grouping,
        sparse_as_dense: bool,
        passes: int,
    ) -> None:
        self.number = next(backward_end.numbers)
        self.nested = False
        self.passes = passes
        self._share = 1.0  # weight of the gradients of one pass in their sum
        self.meter: NoiseMeter | None = None
        self.batch_size: float | None = None  # samples of this rank in a backward pass, if known
        # Sums of squares of the gradients, a number for each bucket: before and after the reduction.
        self._here: list[Tensor] = []
        self._reduced: list[Tensor] = []
        self.how = how
        self._compression = compression
        self._choice = LinkChoice() if isinstance(compression, AutoCompression) else None
        self._pass_ended = 0.0  # before the exchange of `backward_end`, which may wait for early buckets
        self._residuals: Residuals = {}
        self._members: tuple[int, ...] = ()
        self._groups = groups
        self._sparse_as_dense = sparse_as_dense
        self._owner: weakref.ref[Owner] | None = None
        self._layout: _Layout | None = None
        self.generation: weakref.ref[Communicator] | None = None
        self._has_entered = False
        self._disruptions = world.disruptions()
        self._touched: dict[Tensor, None] = {}  # reached since they were last reduced
        self._settled: set[Tensor] = set()  # with a gradient that was reduced since the last step
        self._micro: dict[Tensor, Tensor] = {}  # sums of earlier micro-batches of this step
        self._present: dict[Tensor, Tensor] = {}  # gradients of the present micro-batch, unless it is the last
        self._whole: set[Tensor] = set()  # parameters whose gradient includes the sum in `_micro`
        self._quiet: list[Tensor] = []  # parameters whose gradient is zeros in place of the one in `_present`
        self._has_reduced = False  # since the last step
        self._reductions = 0
        self._ended = 0  # passes since the last reduction that count for ``passes``
        self._added = 0  # all passes since then
        self._earlier = 0  # passes of earlier micro-batches
        self._paused = False
        self._slot_text = ""
        self._hooks: dict[Tensor, list[RemovableHandle]] = {}
        weakref.finalize(self, _remove, self._hooks)

    def __reduce__(self) -> Any:
        """Unpickles without parameters, with the sums of earlier micro-batches."""
        made_with = self.how, self._compression, self._groups, self._sparse_as_dense, self.passes
        return (
            type(self),
            made_with,
            {
                "_share": self._share,
                "meter": self.meter,
                "batch_size": self.batch_size,
                "_residuals": dict(self._residuals),
                "_members": self._members,
                "_micro": dict(self._micro),
                "_earlier": self._earlier,
            },
        )

    def watch(self, owner: Owner) -> None:
        """Reduce the gradients of ``owner`` from now on, also of parameters that it has got since an earlier call."""
        self._owner = weakref.ref(owner)
        self._slot_text = ""
        named = owner.named_gradients()
        if taken := self._hooks.keys() - {parameter for _, parameter in named}:
            self.reset()
            _remove({parameter: self._hooks.pop(parameter) for parameter in taken})
        if not named:
            return self.close()
        backward_end.register(self)
        for _, parameter in named:
            if parameter not in self._hooks and (parameter.is_floating_point() or parameter.is_complex()):
                self._hooks[parameter] = _hooked(parameter, weakref.ref(self), self._multiplies)

    def average_over(self, passes: int) -> None:
        """From the next step on, reduce the mean of the gradients of ``passes`` micro-batches."""
        how, before = self.how, self._share
        self._share = 1.0 / passes
        self.how = how._replace(prescale=how.prescale / before * self._share)
        self.reset()
        self.drop_residuals()
        _remove(self._hooks)
        if self._owner and (owner := self._owner()) is not None:
            self.watch(owner)

    def reduces_as(self, other: GradientReducer) -> bool:
        """Whether both reduce any gradient to the same value, on the same ranks."""
        same = type(self) is type(other) is GradientReducer and self.how.op == other.how.op
        return same and self.how.process_set == other.how.process_set

    def close(self) -> None:
        """Remove the hooks: another reducer has taken over the parameters."""
        self._layout = None
        _remove(self._hooks)
        backward_end.remove(self)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which new gradients are only added to ``p.grad``."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # --- the present step ---
    def settle(self) -> bool:
        """Reduce gradients that no pass has reduced since the last step. Returns whether a rank had any.

        The program may have set gradients itself, or no pass has reached a parameter on this rank. All ranks call this.
        """
        backward_end.end_broken()
        self._enter_generation()
        for _, parameter in self._trainable():
            grad = parameter.grad
            if grad is not None and parameter not in self._settled and getattr(grad, _STEPPED, -1) != grad._version:
                self._touch(parameter)
        if self._has_reduced and not self._touched and not self._has_put_away:
            return False
        before = self._reductions
        backward_end.reduce_together([self])
        return self._reductions > before and self.how.process_set.size() > 1

    def end_step(self, shares: bool = False) -> None:
        """Begin the next step, for which the present gradients are not reduced.

        ``shares``: another optimizer of some of the parameters may step on the same gradients next.
        """
        for parameter in self._settled if shares else ():
            if parameter.grad is not None:
                setattr(parameter.grad, _STEPPED, parameter.grad._version)
        self._settled.clear()
        self._has_reduced = False

    def forget(self) -> None:
        """Reset the notes of gradients, which are now None or zero. Sums of earlier micro-batches stay."""
        backward_end.end_broken()
        self._enter_generation()
        self._forget()

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        """Add all gradients, even if the program has set them, to the sums of earlier micro-batches."""
        self._put_away(self._named())
        for parameter, grad in self._present.items():
            _add(self._micro, parameter, grad)
        self._present.clear()
        self._earlier = self._added

    def drop_micro_batches(self) -> None:
        """Drop the sums of earlier micro-batches."""
        self._micro.clear()
        self._whole.clear()
        self._present.clear()
        self._earlier = 0

    def drop_residuals(self) -> None:
        """Drop the compression errors of earlier gradients, for instance because other weights have been loaded."""
        self._residuals.clear()

    def reset(self) -> None:
        """Forget all but the gradients; the next reduction makes a new plan."""
        self._layout = None
        self.drop_micro_batches()
        self._forget()

    def _forget(self) -> None:
        self.end_step()
        self._touched.clear()
        self._present.clear()
        self._whole.clear()
        self._ended, self._added = 0, self._earlier
        if self._layout is not None:
            for bucket in self._layout.buckets:
                bucket.reset()

    def _enter_generation(self) -> None:
        """In a new generation agree anew; after an abort drop gradients: the ranks' may be of different passes."""
        process_set = self.how.process_set
        communicator = process_set.communicator if process_set.included() else None
        if (self.generation() if self.generation else None) is communicator and self._has_entered:
            return
        self._has_entered = True
        self.generation = None if communicator is None else weakref.ref(communicator)
        self._layout = None
        self.end_step()
        if world.disruptions() > self._disruptions:
            self.drop_micro_batches()
            self._forget()
        self._disruptions = world.disruptions()
        if communicator is not None and self._members != (members := (*communicator.ranks, communicator.rank)):
            self._members = members
            self.drop_residuals()
        self._choice = LinkChoice() if isinstance(self._compression, AutoCompression) else None

    # --- as `backward_end` sees it ---
    def slot_text(self) -> str:
        """The names and shapes of the parameters."""
        if not self._slot_text:
            self._slot_text = repr([(name, tuple(parameter.shape)) for name, parameter in self._named()])
        return self._slot_text

    def process_set(self) -> ProcessSet:
        """The ranks that reduce."""
        return self.how.process_set

    def end_pass(self) -> bool:
        """Count a pass; between micro-batches put the gradients away, so that clipping does not see partial sums."""
        self._added += 1
        self._pass_ended = perf_counter()
        if self._paused:
            return False
        owner = None if self._owner is None else self._owner()
        if owner is not None and owner.is_between_steps():
            self._put_away(owner.named_gradients())
            return False
        self._ended += 1
        return self._ended >= self.passes

    def reach(self) -> tuple[bool, bool]:
        """Whether passes since the last reduction have reached any bucket, and all of them."""
        some = bool(self._touched) or self._has_put_away
        layout = self._layout
        if not some or layout is None or not self._holds(layout):
            return some, some
        every = all(bucket.reached for bucket in layout.buckets) and all(p in self._touched for _, p in layout.sparse)
        return some, every

    def drop(self) -> None:
        self._forget()
        for _, parameter in self._named():
            parameter.grad = None

    @torch.no_grad()
    def reduce(self, partly: bool, name: str) -> None:
        """Replace gradients by their reduction; all ranks of the group call this, after `reach`."""
        process_set = self.how.process_set
        self._take_back()
        if not process_set.included() or process_set.size() == 1:
            self._scale_alone()
        else:
            self._enter_generation()
            trainable = self._trainable()
            if self._layout is not None and not self._holds(self._layout):
                self._layout = None
            try:
                layout = self._layout = self._layout or self._plan(trainable)
                self._reduce(layout, partly, name)
                late = [(label, p) for label, p in trainable if p not in layout.places]
                if late:
                    self._reduce(self._plan(late), False, name)
            except BaseException:
                self.reset()
                raise
            self._measure()
            turned = any(bucket.turned_sparse for bucket in layout.buckets)
            chosen = (
                self._choice is not None
                and spans_hosts(self.how)
                and self._choice.end(layout.names, self._pass_ended, self.how)
            )
            if late or turned or chosen or len(trainable) != len(layout.places) or (self.nested and layout.threaded):
                # Parameters were added, frozen or unfrozen: make a new plan, so that frozen ones cost nothing.
                self._layout = None
        self._touched.clear()
        self._has_reduced = True
        self._reductions += 1
        self._ended = self._added = 0

    # --- within ---
    def _named(self) -> Named:
        owner = None if self._owner is None else self._owner()
        return [] if owner is None else owner.named_gradients()

    def _trainable(self) -> Named:
        return [(name, p) for name, p in self._named() if p.requires_grad]

    @property
    def _multiplies(self) -> bool:
        return self._share != 1.0 or self.how.op == ReduceOp.SUM

    @property
    def _factor(self) -> float:
        """The factor by which a reduction multiplies gradients that are equal on all ranks."""
        process_set = self.how.process_set
        sums = self.how.op == ReduceOp.SUM and process_set.included()
        return self._share * (process_set.size() if sums else 1)

    def _undo_factor(self, parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is not None and getattr(grad, _IS_MULTIPLIED, False):
            setattr(grad, _IS_MULTIPLIED, False)
            grad.mul_(1.0 / self._factor)

    def _note_factor(self, parameters: Iterable[Tensor]) -> None:
        """Note that a reduction has multiplied the gradients of ``parameters``."""
        if self._factor != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    setattr(parameter.grad, _IS_MULTIPLIED, True)

    def _put_away(self, named: Named) -> None:
        """Move the gradients of the present micro-batch to `_present`.

        The smallest parameter of a device gets zeros, because a GradScaler refuses an optimizer without gradients.
        """
        smallest: dict[torch.device, Tensor] = {}
        for _, parameter in named:
            if (grad := parameter.grad) is None:
                continue
            self._undo_factor(parameter)
            _add(self._present, parameter, grad)
            parameter.grad = None
            least = smallest.setdefault(parameter.device, parameter)
            if not grad.is_sparse and parameter.numel() < least.numel():
                smallest[parameter.device] = parameter
        self._quiet = [one for one in smallest.values() if not self._present[one].is_sparse]
        for parameter in self._quiet:
            parameter.grad = torch.zeros_like(parameter)

    @property
    def _has_put_away(self) -> bool:
        """Whether something was put away that the gradients do not include yet."""
        return bool(self._present) or len(self._whole) < len(self._micro)

    def _take_back(self) -> None:
        """Add to the gradients of the last micro-batch what was put away."""
        for parameter in {**self._micro, **self._present}:
            self._take_back_of(parameter)

    @torch.no_grad()
    def _take_back_of(self, parameter: Tensor) -> None:
        """The sums in `_micro` stay until the step, because ``zero_grad()`` drops only the last micro-batch."""
        found = [self._present.pop(parameter, None)]
        is_whole = parameter in self._whole and parameter.grad is not None
        if not is_whole and (micro := self._micro.get(parameter)) is not None:
            self._whole.add(parameter)
            found.append(micro.clone() if parameter.grad is None else micro)
        for one in found:
            if one is not None:
                self._touch(parameter)
                grad = parameter.grad
                parameter.grad = (
                    one if grad is None else grad + one if grad.is_sparse or one.is_sparse else grad.add_(one)
                )

    def _scale_alone(self) -> None:
        """The reduction on a single rank: only the mean over micro-batches."""
        if self._factor != 1.0:
            known = [p for _, p in self._named() if p.grad is not None]
            for parameter in known:
                self._undo_factor(parameter)
            multiply_each([p.grad for p in known if p.grad is not None], self._factor)
            self._note_factor(known)
        self._settled.update(p for _, p in self._named() if p.grad is not None)

    def _holds(self, layout: _Layout) -> bool:
        """Whether all ranks still have this plan."""
        return layout.communicator() is self.how.process_set.communicator and layout.joins == joins()

    def _plan(self, trainable: Named) -> _Layout:
        """Agree with the other ranks how to reduce ``trainable``."""
        parameters = [p for _, p in trainable]
        process_set = self.how.process_set
        communicator = process_set.communicator
        specs = [ParameterSpec(name, tuple(real_view(p).shape), dtype_of(real_view(p))) for name, p in trainable]
        sparse_here = [p.grad is not None and p.grad.is_sparse and not self._sparse_as_dense for p in parameters]
        threshold, form = config().fusion_threshold, ""
        if isinstance(self._compression, GradientCompression) and spans_hosts(self.how):
            threshold, form = min(threshold, MOST), repr(self._compression)
        division = (threshold, self._groups(parameters), form)
        beside = (
            backward_end.ENDS_ARE_SEEN
            and not self.nested
            and reduces_beside_backward(any(not parameter.is_cpu for parameter in parameters))
        )
        threaded, mark = agree_on_plan(specs, division, beside, process_set)
        sparse = agree_on_sparse(sparse_here, process_set)
        layout = _Layout(weakref.ref(communicator), threaded)
        if self._choice is not None:
            self._choice.begin()
        layout.sparse = [pair for pair, is_sparse in zip(trainable, sparse, strict=True) if is_sparse]
        layout.places = {p: None for _, p in layout.sparse}
        dense = [index for index, is_sparse in enumerate(sparse) if not is_sparse]
        chosen = [parameters[index] for index in dense]
        plans = plan_buckets([specs[index] for index in dense], threshold, self._groups(chosen))
        for number, plan in enumerate(plans):
            members = [chosen[index] for index in plan.parameters]
            name = f"gradients {mark}, bucket {number}"
            names = tuple(trainable[dense[index]][0] for index in plan.parameters)
            way = self._compression if self._choice is None else self._choice.of(names)
            averager = averager_of(way, members, names, self.how, self._residuals)
            plainly = Compression.none if isinstance(way, GradientCompression) else way
            bucket = Bucket(members, name, self.how, plainly, self._sparse_as_dense, averager)
            layout.names[bucket] = names
            layout.buckets.append(bucket)
            layout.places.update({p: (bucket, position) for position, p in enumerate(members)})
            bucket.reached = any(p in self._touched for p in members)
        return layout

    def _touch(self, parameter: Tensor) -> None:
        self._touched[parameter] = None
        if self._layout is not None and (place := self._layout.places.get(parameter)) is not None:
            place[0].reached = True

    def _before_gradient(self, parameter: Tensor) -> None:
        """Called before a pass adds to the gradient, which the model's ``zero_grad()`` may have made None."""
        if parameter.grad is None:
            self._whole.discard(parameter)
        if any(one.grad is None for one in self._quiet):
            self._present.clear()
        with torch.no_grad():
            self._undo_factor(parameter)

    def _on_gradient(self, parameter: Tensor) -> None:
        if not world.is_initialized():
            return
        self._enter_generation()
        if backward_end.ENDS_ARE_SEEN and backward_end.note(self, parameter):
            self.nested = True
        self._touch(parameter)
        if self._choice is not None:
            self._choice.note(parameter)
        layout = self._layout
        if layout is None or not layout.threaded or self._paused or self._ended + 1 < self.passes:
            return
        place = layout.places.get(parameter)
        owner = None if self._owner is None else self._owner()
        if place is None or owner is None or owner.is_between_steps():
            return
        bucket, position = place
        if bucket.started:
            raise RuntimeError(
                f"rank {self.how.process_set.rank()}: backward made a gradient again while it was being reduced, in a "
                "backward pass within another one, which no earlier pass had; call optimizer.zero_grad() and continue, "
                "or set RING_OVERLAP=inline, which reduces nothing before the end of a pass"
            )
        self._take_back_of(parameter)
        bucket.mark_ready(position)
        if bucket.full and not self.nested and self._holds(layout):
            self._start(bucket, blocking=False)
            layout.started.append(bucket)
        for one in layout.started:
            one.advance()

    def _measuring(self) -> bool:
        return self.meter is not None and self.meter.wanted and not self._has_reduced

    def _measure(self) -> None:
        """Give the meter the first reduction of a step; it could not separate the gradients of later passes."""
        if self.meter is not None and not self._has_reduced:
            self.meter.end_round(_total(self._here), _total(self._reduced), self._added, self.how)
        self._here, self._reduced = [], []

    def _start(self, bucket: Bucket, *, blocking: bool) -> None:
        if self._multiplies:
            for parameter in bucket.parameters:
                self._undo_factor(parameter)
        if self._measuring():
            self._here.append(bucket.square())
        bucket.start(blocking=blocking)

    def _reduce(self, layout: _Layout, partly: bool, name: str) -> None:
        """Reduce the remaining buckets; with ``partly`` only those that some rank has reached."""
        process_set = self.how.process_set
        buckets, sparse = layout.buckets, layout.sparse
        if partly:
            here = [*(bucket.reached for bucket in buckets), *(p in self._touched for _, p in sparse)]
            counts = allreduce_numbers([int(one) for one in here], ReduceOp.SUM, f"{name}, buckets", process_set)
            buckets = [bucket for bucket, count in zip(buckets, counts, strict=False) if count]
            sparse = [pair for pair, count in zip(sparse, counts[len(layout.buckets) :], strict=True) if count]
        for bucket in buckets:
            if not bucket.started:
                bucket.make_dense()
                self._start(bucket, blocking=not layout.threaded)
        layout.started.clear()
        going = list(buckets)
        while going := [bucket for bucket in going if bucket.step()]:
            pass
        for bucket in buckets:
            bucket.finish()
            if self._measuring():
                self._reduced.append(bucket.square())
        for bucket in buckets:
            if bucket.turned_sparse:
                bucket.make_sparse(agree_on_sparse(bucket.sparse, process_set))
        for _, parameter in sparse:
            self._undo_factor(parameter)
        how = self.how
        results = [sparse_allreduce_async(sparse_gradient(p), label, how.op, process_set) for label, p in sparse]
        for (_, parameter), result in zip(sparse, results, strict=True):
            grad = result()
            if parameter.grad is not None or grad.coalesce().indices().numel():
                parameter.grad = grad if self._share == 1.0 else grad * self._share
        done = [*(p for bucket in buckets for p in bucket.parameters), *(p for _, p in sparse)]
        self._settled.update(p for p in done if p.grad is not None)
        self._note_factor(done)


def _add(sums: dict[Tensor, Tensor], parameter: Tensor, grad: Tensor) -> None:
    known = sums.get(parameter)
    sums[parameter] = grad if known is None else known + grad if known.is_sparse or grad.is_sparse else known.add_(grad)


def _total(squares: Sequence[Tensor]) -> float:
    """The sum of ``squares``. Waits for their device."""
    return sum(float(square) for square in squares)


def _remove(hooks: dict[Tensor, list[RemovableHandle]]) -> None:
    while hooks:
        for hook in hooks.popitem()[1]:
            hook.remove()


def _hooked(parameter: Tensor, reducer: weakref.ref[GradientReducer], and_before: bool) -> list[RemovableHandle]:
    """Hooks that do not keep their reducer alive, after and perhaps before a pass adds to a gradient."""

    @uncompiled
    def on_gradient(parameter: Tensor) -> None:
        if (listening := reducer()) is not None:
            listening._on_gradient(parameter)

    own = weakref.ref(parameter)

    @unserializable_hook  # type: ignore[untyped-decorator]  # a copy of the optimizer makes its own
    @uncompiled
    def before(_: Tensor) -> None:
        listening, parameter = reducer(), own()
        if listening is not None and parameter is not None:
            listening._before_gradient(parameter)

    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch registers no hooks on a frozen one; they run once it trains again
    hooks = [parameter.register_post_accumulate_grad_hook(on_gradient)]  # type: ignore[no-untyped-call]
    if and_before:
        hooks.append(parameter.register_hook(before))  # type: ignore[no-untyped-call]
    parameter.requires_grad_(is_trained)
    return hooks
