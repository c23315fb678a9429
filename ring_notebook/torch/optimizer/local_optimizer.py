"""The optimizer whose ranks step alone and sync their weights every few steps: local SGD and DiLoCo.

Between syncs the weights of the ranks differ. Equal on all ranks are the *common* weights, which only syncs move, and
the momentum of the outer optimizer:

1. Each rank computes the difference of the common weights of a fragment and its own.
2. The ranks average their differences; with a delay they make steps meanwhile.
3. They commit. Then each makes the outer step on the common weights, and takes these, or a share of them.

An interrupt or a failure before the commit changes nothing, and the fragment is synced later. `_level` synchronizes
ranks that an abort has left at different steps of a round.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ring_notebook.api.arguments import Reduction
from ring_notebook.api.basics import joins
from ring_notebook.api.bucket_plan import ParameterSpec, agree_on_plan
from ring_notebook.api.local_steps import LocalSteps, plan_fragments
from ring_notebook.api.objects import allreduce_numbers, gather_objects
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core import metrics, world
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.step_guard import step_guard
from ring_notebook.errors import CollectiveMismatch
from ring_notebook.torch.collectives.broadcast import broadcast_
from ring_notebook.torch.compression import Compression, Compressor, Int8Compression
from ring_notebook.torch.optimizer.averages import (
    Average,
    Besides,
    ByteGroups,
    Feedback,
    in_bytes,
    in_floats,
)
from ring_notebook.torch.optimizer.gradient_reducer import GradientReducer, Grouping
from ring_notebook.torch.optimizer.wrapper import Wrapper, once, owners_of, parameters_of
from ring_notebook.torch.steps.optimizer_knobs import count_step, renew_knobs
from ring_notebook.torch.steps.optimizer_notes import notes_of
from ring_notebook.torch.steps.repair import Shared, give_rest, mend
from ring_notebook.torch.steps.step_commit import committed
from ring_notebook.torch.tensors import dtype_of
from ring_notebook.torch_private import uncompiled

_MB = 1e-6
_NUMBERS = ("member", "position", "alone", "sent", "every_step")  # the fields of `Outer` without tensors


@dataclass
class Outer:
    """The outer optimizer's state. Tensors are by parameter; ``position`` counts local steps since a round began.

    ``common`` has the shape and dtype of its parameter; ``momentum`` is float32, or float64 for a float64 parameter.
    ``feedback``, by fragment, belongs to ``member``, a rank and a number of ranks. ``alone`` counts local steps since
    all weights were equal. ``sent`` is the bytes of the differences as they were sent, ``every_step`` the bytes of
    gradients that reductions at every step would have sent.
    """

    common: dict[Tensor, Tensor] = field(default_factory=dict)
    momentum: dict[Tensor, Tensor] = field(default_factory=dict)
    feedback: dict[int, Feedback] = field(default_factory=dict)
    member: tuple[int, int] = (0, 1)
    position: int = 0
    alone: int = 0
    sent: int = 0
    every_step: int = 0

    def add(self, parameters: Sequence[Tensor], momentum: bool) -> None:
        """Add parameters: the present values of new ones are common weights, their ``momentum``, if any, is 0."""
        for one in parameters:
            if one not in self.common:
                self.common[one] = one.detach().clone()
            if momentum and one not in self.momentum:
                self.momentum[one] = torch.zeros_like(one, dtype=_exact(one), requires_grad=False)

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Set all parameters to the common weights, and begin a round."""
        for parameter, common in self.common.items():
            parameter.copy_(common)
        self.position = self.alone = 0
        self.feedback.clear()


@dataclass
class _Averaging:
    """A fragment whose differences are being averaged; it is due in ``left`` steps."""

    number: int
    parameters: Sequence[Tensor]
    differences: Sequence[Tensor]
    average: Average
    left: int
    besides: Besides


class _Alone(ProcessSet):
    """This rank alone, in any generation: nothing is sent."""

    def __init__(self) -> None:
        super().__init__(())

    def included(self) -> bool:
        return False

    def size(self) -> int:
        return 1

    def __reduce__(self) -> Any:
        return _Alone, ()


class LocalOptimizer(Wrapper):
    """Mixed into the class of the wrapped optimizer by ``DistributedOptimizer(..., sync_every=50)``."""

    option = "sync_every"
    _settings: LocalSteps
    _compression: Compressor
    _micro: GradientReducer | None = None
    """Adds up the gradients of micro-batches."""
    _averaging: _Averaging | None = None
    _groups: ByteGroups | None = None  # with Compression.int8
    _fragments: tuple[tuple[Tensor, ...], ...] = ()
    _apart: set[Tensor]  # parameters trained since they were set to the common weights
    _gradient_bytes = 0
    _squares: dict[int, float]  # squared distance to the average, by fragment
    _label = "sync"  # prefix of its metrics
    _mark = ""  # in names of its operations, equal on all ranks

    def _prepare(self, settings: LocalSteps, compression: Compressor, process_set: ProcessSet) -> None:
        self._settings, self._compression, self._process_set = settings, compression, process_set
        self._squares = {}
        self._apart = set()

    # --- as the other wrappers ---
    def synchronize(self) -> None:
        """Does nothing: gradients are this rank's own. `sync` makes the weights of the ranks equal."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """A context that changes nothing, because `step` reduces no gradients."""
        return nullcontext()

    @once
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of the wrapped optimizer on this rank's gradients, then the part of a sync that is due.

        All ranks call it equally often. If a GradScaler has found an inf or nan on this rank, the rank makes no step,
        but the call counts as one.
        """
        self._check_newest()
        if self._only_counts(closure):
            return None
        outer = self._begin()
        with self._unscaled() as overflowed:
            if self._micro is not None:
                self._micro.settle()
            with self._own_step(), self._guarded_step(closure):
                result = None if overflowed(None) else super().step(closure)
                # The minimum, because a failed sync is made again after the next step.
                outer.position = min(outer.position + 1, self._settings.every)
                outer.alone += 1
                outer.every_step += 0 if self._is_alone() else self._gradient_bytes
                self._mark_stepped()
        self._forget_micro_batches()
        renew_knobs(self._wrapped)
        self._sync_what_is_due(outer)
        return result

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's; micro-batches stay for which `step` was already called."""
        if self._micro is not None:
            self._micro.forget()
        super().zero_grad(set_to_none)

    def accumulate(self, micro_batches: int) -> None:
        """See `Wrapper.accumulate`."""
        if self._micro is None and micro_batches > 1:
            alone = Reduction(ReduceOp.AVERAGE, 1.0, 1.0, _Alone())
            self._micro = GradientReducer(alone, Compression.none, Grouping(0), False, 1)
            self._micro.watch(self)
        super().accumulate(micro_batches)

    def _own_reducers(self) -> Sequence[GradientReducer]:
        return () if self._micro is None else (self._micro,)

    def _forget_micro_batches(self) -> None:
        self._seen = 0
        if self._micro is not None:
            self._micro.end_step()
            self._micro.drop_micro_batches()

    def _claimed(self) -> None:
        super()._claimed()
        _all.add(self)
        world.at_close(_tell_unsynced)
        if self._micro is not None:
            self._micro.watch(self)

    def _release(self, to: Wrapper) -> None:
        super()._release(to)
        if self._micro is not None:
            self._micro.close()

    # --- syncs ---
    def sync(self) -> None:
        """Make the weights of all ranks equal now: end the round by an outer step on all fragments; all ranks call it.

        Call it before an evaluation or saving the weights. Does nothing if no rank has made a step since the last sync.
        Raises the errors of a collective; the weights then stay as before.
        """
        self._check_newest()
        outer = self._begin()
        if self._averaging is not None:
            self._finish(outer)
        most = outer.alone
        if not self._is_alone():
            (most,) = allreduce_numbers([most], ReduceOp.MAX, "steps since the sync", self._process_set)
        if most == 0:
            return
        self._plan(outer)
        for number in range(len(self._fragments)):
            self._averaging = self._start(outer, number, blocking=True)
            self._finish(outer, kept=0.0)
        outer.position = outer.alone = 0

    @property
    def is_synced(self) -> bool:
        """Whether this rank has made no step since all ranks had equal weights."""
        outer = self._outer
        return outer is None or outer.alone == 0

    @property
    def ends_round(self) -> bool:
        """Whether the last step has ended a round: with one fragment and no delay all ranks have equal weights then."""
        outer = self._outer
        return outer is None or outer.position == 0

    @property
    def common(self) -> dict[Tensor, Tensor]:
        """The weights that all ranks have in common, by parameter; empty before the first step. Do not change them."""
        outer = self._outer
        return {} if outer is None else outer.common

    def _guarded_step(self, closure: object) -> AbstractContextManager[object]:
        if self._is_alone():
            return committed(self._process_set)  # takes changes of knobs
        # A closure may take long; the ranks' weights differ anyway.
        return step_guard.holding() if closure is None else nullcontext()

    def _is_alone(self) -> bool:
        return not self._process_set.included() or self._process_set.size() == 1

    @property
    def _outer(self) -> Outer | None:
        outer: Outer | None = notes_of(self._wrapped).outer
        return outer

    def _noted_outer(self) -> Outer:
        notes = notes_of(self._wrapped)
        notes.outer = outer = notes.outer or Outer()
        return outer

    def _trained(self) -> list[Tensor]:
        return [one for one in parameters_of(self) if one.requires_grad]

    def _named(self, tensors: dict[Tensor, Tensor]) -> list[tuple[str, Tensor]]:
        names = self._parameter_names
        return [(names.get(p, f"parameter {i}"), tensors[p]) for i, p in enumerate(parameters_of(self)) if p in tensors]

    # --- rounds ---
    def _begin(self) -> Outer:
        """The outer state, with all trained parameters; in a new generation the ranks agree on it first."""
        outer = self._noted_outer()
        trained = self._trained()
        outer.add(trained, self._settings.momentum > 0)  # a new parameter is equal on all ranks before its first step
        self._apart.update(trained)
        communicator = (self._process_set if self._process_set.included() else global_process_set).communicator
        if not (self._generation is not None and self._generation() is communicator and self._joins == joins()):
            self._label = self._free_label(communicator)
            if not self._is_alone():
                self._averaging = None  # its fragment is synced later
                if outer.member != (member := (self._process_set.rank(), self._process_set.size())):
                    outer.member = member
                    outer.feedback.clear()
                if isinstance(self._compression, Int8Compression):
                    self._groups = ByteGroups.of(communicator)
                self._level(outer)
            self._generation, self._joins = weakref.ref(communicator), joins()
        if outer.position == 0 or not self._fragments:
            self._plan(outer)
        return outer

    def _plan(self, outer: Outer) -> None:
        """Divide the parameters into fragments: trained ones, and frozen ones that still differ by rank."""
        members = [one for one in parameters_of(self) if one.requires_grad or one in self._apart]
        if list(map(id, chain.from_iterable(self._fragments))) == list(map(id, members)):
            return
        if self._averaging is not None:
            self._finish(outer)
        plan = plan_fragments([one.numel() for one in members], self._settings.fragments)
        self._fragments = tuple(tuple(members[index] for index in part) for part in plan)
        self._gradient_bytes = sum(one.numel() * one.element_size() for one in members)

    def _free_label(self, communicator: Communicator) -> str:
        """A prefix for metrics that no other optimizer uses in this generation; earlier cells' optimizers live on."""
        others = (one for one in _all if one is not self and one._generation and one._generation() is communicator)
        taken = {one._label for one in others}
        numbered = (f"sync {number}" for number in range(2, len(taken) + 2))
        return next(label for label in ("sync", *numbered) if label not in taken)

    def _level(self, outer: Outer) -> None:
        """Set all ranks to the same common weights and the same step of the round."""
        here = notes_of(self._wrapped).steps, outer.position, self._settings, repr(self._compression)
        gathered = gather_objects(here, "local steps", self._process_set)
        for rank, (_, _, *how) in zip(self._process_set.ranks or [], gathered, strict=True):
            if tuple(how) != gathered[0][2:]:
                raise CollectiveMismatch(
                    f"rank {world.current().rank}: the ranks make different local steps: {gathered[0][2:]} on rank "
                    f"{(self._process_set.ranks or [])[0]}, {tuple(how)} on rank {rank}; make the optimizer with the "
                    "same sync_every and compression on every rank"
                )
        trained = [(name, one) for name, one in self._named({one: one for one in self._trained()})]
        specs = [ParameterSpec(name, tuple(one.shape), dtype_of(one)) for name, one in trained]
        _, self._mark = agree_on_plan(specs, self._settings.fragments, False, self._process_set)
        rows = [row[:2] for row in gathered]
        shared = self._shared(outer)
        if mend(shared, whole=True):
            outer.begin_anew()
            self._apart.clear()
            self._forget_micro_batches()
            for one in outer.common:
                one.grad = None
            return
        if len(set(rows)) > 1:
            furthest = max(range(len(rows)), key=lambda rank: (rows[rank], -rank))
            give_rest(shared, (self._process_set.ranks or [])[furthest])
        # At most ``every - 1``, so that a failed sync is made again after the next step.
        outer.position = min(max(position for _, position in rows), self._settings.every - 1)

    def _shared(self, outer: Outer) -> Shared:
        equal = [(f"common weights of {name}", one) for name, one in self._named(outer.common)]
        equal += [(f"outer momentum of {name}", one) for name, one in self._named(outer.momentum)]
        return Shared(self._wrapped, self._parameter_names, self._process_set, state=False, equal=equal)

    def take_outer(self, root: int) -> None:
        """Take the outer state of global rank ``root``, whose weights all ranks have; all ranks call this."""
        self._averaging = None
        outer = self._noted_outer()
        outer.add(self._trained(), self._settings.momentum > 0)
        for name, one in self._shared(outer).equal or ():
            broadcast_(one, root, name, self._process_set)
        outer.begin_anew()
        self._apart.clear()

    def _sync_what_is_due(self, outer: Outer) -> None:
        if (averaging := self._averaging) is not None:
            averaging.left -= 1
            if averaging.left:
                averaging.average.advance()
            else:
                self._finish(outer)
        number = self._settings.due(outer.position, len(self._fragments))
        if number is not None:
            delay = self._settings.delay
            self._averaging = self._start(outer, number, blocking=not delay)
            if not delay:
                self._finish(outer)
        if outer.position >= self._settings.every:
            outer.position = 0

    @torch.no_grad()
    def _start(self, outer: Outer, number: int, blocking: bool) -> _Averaging:
        parameters = self._fragments[number]
        differences = [(outer.common[one].to(_exact(one)) - one) for one in parameters]
        besides = Besides(outer.feedback.get(number))
        name = f"weights {self._mark}, fragment {number}"
        if self._is_alone():
            average = Average(_nothing(differences))
        elif self._groups is not None:
            assert isinstance(self._compression, Int8Compression)
            average = Average(in_bytes(differences, self._groups, self._compression, besides, name, blocking))
        else:
            how = Reduction(ReduceOp.AVERAGE, 1.0, 1.0, self._process_set)
            # A copy: it is reduced in place, and the differences are compared with the averages afterwards.
            sent = [one.clone() for one in differences] if self._compression is Compression.none else differences
            average = Average(in_floats(sent, how, self._compression, besides, name, blocking))
        return _Averaging(number, parameters, differences, average, self._settings.delay, besides)

    @torch.no_grad()
    def _finish(self, outer: Outer, kept: float | None = None) -> None:
        """Wait for the averages of the fragment under way, commit, and make the outer step."""
        averaging, self._averaging = self._averaging, None
        assert averaging is not None
        averages = averaging.average.finish()
        distances = [
            torch.linalg.vector_norm(a - b).item() for a, b in zip(averaging.differences, averages, strict=True)
        ]
        kept = self._settings.kept if kept is None else kept
        with nullcontext() if self._is_alone() else committed(self._process_set):
            for parameter, average in zip(averaging.parameters, averages, strict=True):
                self._outer_step(outer, parameter, average)
                common = outer.common[parameter]
                if kept and parameter.requires_grad:
                    parameter.lerp_(common, 1.0 - kept)
                else:
                    parameter.copy_(common)
                    self._apart.discard(parameter)
            if averaging.besides.feedback is not None:
                outer.feedback[averaging.number] = averaging.besides.feedback
            if outer.position >= self._settings.every:
                outer.position = 0
                outer.alone = 0 if self._settings.ends_equal else outer.alone
            count_step(self._wrapped)
        self._record(outer, averaging, distances)

    def _outer_step(self, outer: Outer, parameter: Tensor, average: Tensor) -> None:
        """As torch.optim.SGD with Nesterov momentum, for which ``average`` is the gradient."""
        if self._settings.momentum:
            momentum = outer.momentum[parameter].mul_(self._settings.momentum).add_(average)
            average = average.add(momentum, alpha=self._settings.momentum)
        common = outer.common[parameter]
        common.copy_(common - self._settings.lr * average)

    # --- what is recorded ---
    def _record(self, outer: Outer, averaging: _Averaging, distances: Sequence[float]) -> None:
        """Add to the rows of `log` this rank's distance from the average, and the bytes sent."""
        outer.sent += averaging.besides.nbytes
        self._squares[averaging.number] = sum(one * one for one in distances)
        values = {
            "distance": sum(self._squares.values()) ** 0.5,
            "MB": outer.sent * _MB,
            "MB_every_step": outer.every_step * _MB,
        }
        if self._settings.by_layer:
            layers = zip(averaging.parameters, distances, strict=True)
            names = self._parameter_names
            values |= {f"distance of {names.get(one, averaging.number)}": distance for one, distance in layers}
        metrics.carry(**{f"{self._label}/{name}": value for name, value in values.items()})

    # --- what is kept ---
    def state_dict(self) -> dict[str, Any]:
        """As torch's own, with the outer state under ``"outer"``, which other optimizers ignore.

        Its error feedback is this rank's own; another rank that loads it drops it.
        """
        whole = super().state_dict()
        if (outer := self._outer) is not None:
            parameters = list(parameters_of(self))
            whole["outer"] = {
                "common": {i: outer.common[p] for i, p in enumerate(parameters) if p in outer.common},
                "momentum": {i: outer.momentum[p] for i, p in enumerate(parameters) if p in outer.momentum},
                "feedback": {number: (one.sent, one.averaged) for number, one in outer.feedback.items()},
                **{name: getattr(outer, name) for name in _NUMBERS},
                "syncs": notes_of(self._wrapped).steps,
            }
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's own; without an outer state, the present weights become the common weights at the next step."""
        super().load_state_dict(state_dict)
        self._averaging, self._fragments = None, ()
        self._apart.clear()
        self._forget_micro_batches()
        self._generation = None  # all ranks compare what they have loaded
        given = state_dict.get("outer")
        if given is None:
            notes_of(self._wrapped).outer = None
            return
        parameters = list(parameters_of(self))
        outer = Outer(**{name: given[name] for name in _NUMBERS})
        for i, one in given["common"].items():
            outer.common[parameters[i]] = one.detach().to(parameters[i], copy=True)
        for i, one in given["momentum"].items():
            target = parameters[i]
            outer.momentum[target] = one.detach().to(target.device, _exact(target), copy=True)
        outer.feedback = {n: Feedback(sent.clone(), own.clone()) for n, (sent, own) in given["feedback"].items()}
        notes = notes_of(self._wrapped)
        notes.outer, notes.steps = outer, given["syncs"]


def _exact(parameter: Tensor) -> torch.dtype:
    """The dtype of differences and momentum."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _nothing(differences: list[Tensor]) -> Any:
    """The average of one rank."""
    return differences
    yield


_all: weakref.WeakSet[LocalOptimizer] = weakref.WeakSet()


def _tell_unsynced() -> None:
    """At the end of a generation, report that the weights of its ranks differ."""
    if world.is_aborted() or world.current().rank != 0:
        return
    for one in list(_all):
        generation = one._generation() if one._generation else None
        is_here = generation is world.current().communicator and not one._is_alone()
        if one._superseded or not is_here or one.is_synced:
            continue
        sys.stderr.write(
            "The weights of the ranks differ, because each has stepped alone since the last sync; `optimizer.sync()` "
            "on all ranks makes them equal.\n"
        )


def end_rounds(optimizers: Sequence[torch.optim.Optimizer], root: int) -> tuple[int, list[bool]]:
    """Before `prepare` gives all ranks the weights of ``root``: end rounds, so that its weights are common weights.

    A round ends by an outer step if all ranks have an outer state. If some lack it, as after a restart of a rank, the
    others go back to the common weights. Returns the rank whose weights count, and for each optimizer whether some
    ranks lack its outer state. All ranks call this.
    """
    here = [notes_of(one).outer is not None for one in optimizers]
    rows = [here]
    if world.disruptions():
        rows = gather_objects(here, "optimizers with local steps", global_process_set)
    lacking = [False] * len(here)
    for number, optimizer in enumerate(optimizers):
        having = [row[number] for row in rows]
        if not any(having):
            continue
        owners = [one for one in owners_of(parameters_of(optimizer)) if isinstance(one, LocalOptimizer)]
        if all(having) and owners:
            owners[0].sync()
            continue
        lacking[number] = True
        root = having.index(True) if not having[root] else root
        if here[number]:
            with torch.no_grad():
                for parameter, common in notes_of(optimizer).outer.common.items():
                    parameter.copy_(common)
    return root, lacking
