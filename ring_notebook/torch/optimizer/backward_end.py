"""The end of a backward pass, where all optimizers whose parameters it reached reduce their gradients together.

A hook of the first parameter that a pass reaches queues one callback on autograd's engine, as torch's own
DistributedDataParallel and FSDP2 do. In it the ranks exchange which optimizers the pass has reached anywhere. So a rank
whose pass reached fewer takes part for all, with zeros; one whose pass reached none does so in its next `step`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import count
from typing import Protocol
from zlib import crc32

from torch import Tensor

from ring_notebook.api.basics import joins
from ring_notebook.api.objects import allreduce_numbers
from ring_notebook.api.process_sets import ProcessSet
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.torch_private import in_compiled_autograd, private, uncompiled

_at_end_of_backward, _task = private("at_end_of_backward"), private("current_graph_task")
ENDS_ARE_SEEN = _at_end_of_backward is not None and _task is not None
"""Whether gradients are averages when `backward` returns. If this torch lacks private names, only after `step`."""
_NEW = 1 << 14
"""Slots in the message for reducers that have not reduced before."""
_MOST = 1 << 12
"""Slots for reducers that have; they are reused when all are taken."""
_ALL = 1 << 20  # more than the number of ranks


class Reducer(Protocol):
    """Reduces the gradients of one optimizer, or of parameters that no optimizer has."""

    number: int
    """Numbers reducers in the order of their creation in this process."""
    nested: bool
    """Whether one pass ran within another, so that nothing can be reduced before its end."""
    sends_early: bool
    """Whether it may send gradients before the end of a pass."""
    generation: weakref.ref[Communicator] | None
    """The communicator of the last, or next, reduction; None on a rank outside of the set."""

    def slot_text(self) -> str:
        """A text that identifies the reducer, equal on all ranks."""

    def process_set(self) -> ProcessSet:
        """The ranks that reduce."""

    def end_pass(self) -> bool:
        """Note the end of a pass that has reached it; returns whether the gradients are due."""

    def reach(self) -> tuple[bool, bool]:
        """Whether passes since the last reduction have reached any of its buckets, and all of them."""

    def reduce(self, partly: bool, name: str) -> None:
        """Reduce; ``partly``: agree first on the buckets that a rank has reached. All ranks call it."""

    def drop(self) -> None:
        """Drop the gradients, which are no averages."""


numbers = count()


class _Pass:
    def __init__(self, task: int) -> None:
        self.task = task
        self.reached: dict[Reducer, weakref.ref[Communicator] | None] = {}


class _End:
    """Autograd's callback at the end of a pass. If the pass raises, autograd drops it without a call."""

    def __init__(self, of: _Pass) -> None:
        self.of: _Pass | None = of
        weakref.finalize(self, _raised, of).atexit = False

    @uncompiled
    def __call__(self) -> None:
        of, self.of = self.of, None
        assert of is not None
        if _passes.pop(of.task, None) is of:
            reduce_together([one for one in of.reached if one.end_pass()])


_passes: dict[int, _Pass] = {}
"""The passes in progress, by autograd's number."""
_broken: dict[Reducer, weakref.ref[Communicator] | None] = {}
"""Reducers reached by a pass that raised an exception, until the other ranks know of it."""
_known: weakref.WeakKeyDictionary[Communicator, _Known] = weakref.WeakKeyDictionary()
_all: weakref.WeakSet[Reducer] = weakref.WeakSet()


class _Known:
    """Equal on all ranks of a communicator: the number of passes, and the slots of reducers."""

    def __init__(self) -> None:
        self.passes = 0
        self.joins = joins()
        self.added = 0
        self._at: dict[int, weakref.ref[Reducer]] = {}
        self._slots: weakref.WeakKeyDictionary[Reducer, int] = weakref.WeakKeyDictionary()

    def slot(self, reducer: Reducer) -> int:
        """The slot that the ranks gave the reducer after its first reduction; before that, one below 0 by its text."""
        known = self._slots.get(reducer)
        return _hash(reducer) if known is None else known

    def at(self, slot: int) -> Reducer | None:
        """The reducer of a slot that no pass on this rank has reached; below 0, the newest one that fits."""
        if slot >= 0:
            return self._at[slot]() if slot in self._at else None
        unknown = (one for one in _all if one not in self._slots and one.process_set().registered())
        fitting = [one for one in unknown if _hash(one) == slot]
        return max(fitting, key=lambda one: one.number) if fitting else None

    def add(self, reducer: Reducer) -> None:
        """Give the reducer a slot of its own; all ranks add reducers in the same order."""
        if reducer not in self._slots:
            slot = self._slots[reducer] = self.added % _MOST
            self._at[slot] = weakref.ref(reducer)
            self.added += 1


def _hash(reducer: Reducer) -> int:
    return crc32(reducer.slot_text().encode()) % _NEW - _NEW


def register(reducer: Reducer) -> None:
    """Have ``reducer`` take part when another rank's pass reaches its counterpart there."""
    _all.add(reducer)


def remove(reducer: Reducer) -> None:
    """Undo `register`."""
    _all.discard(reducer)
    _broken.pop(reducer, None)


def begin() -> None:
    """Before a pass makes a gradient: drop the gradients of an earlier pass that raised."""
    if _broken and _task() not in _passes:
        end_broken()


def note(reducer: Reducer, parameter: Tensor) -> bool:
    """Note that the pass in progress has reached ``parameter``; returns whether it runs within another pass."""
    task = _task()
    found = _passes.get(task)
    if found is None:
        if _broken:
            gradient = None if parameter.grad is None else parameter.grad.clone()
            end_broken()
            parameter.grad = gradient
        if in_compiled_autograd():
            raise RuntimeError(
                f"rank {reducer.process_set().rank()}: gradients are averaged at the end of a backward pass, which "
                "compiled autograd does not tell; leave torch's compiled_autograd off: torch.compile of the model "
                "and of its loss does not need it"
            )
        found = _passes[task] = _Pass(task)
        _at_end_of_backward(_End(found))
    found.reached[reducer] = reducer.generation
    return len(_passes) > 1


def _raised(of: _Pass) -> None:
    if _passes.get(of.task) is of:
        del _passes[of.task]
        _broken.update(of.reached)


def end_broken() -> None:
    """If a pass has raised here, tell the other ranks: theirs raises too, because there is no average."""
    if not _broken:
        return
    broken = dict(_broken)
    _broken.clear()
    reduce_together(
        [one for one, generation in broken.items() if generation and _is_in(one, generation())], broken=True
    )


def _is_in(reducer: Reducer, communicator: Communicator | None) -> bool:
    process_set = reducer.process_set()
    return (
        process_set.registered()
        and process_set.included()
        and process_set.size() > 1
        and process_set.communicator is communicator
    )


def reduce_together(reducers: Iterable[Reducer], broken: bool = False) -> None:
    """Reduce ``reducers``, and others that passes of other ranks have reached; all ranks of their sets call this.

    Raises RuntimeError if another rank's pass has raised.
    """
    by_set: dict[tuple[int, ...], list[Reducer]] = {}
    for one in sorted(reducers, key=lambda one: one.number):
        process_set = one.process_set()
        if not process_set.included() or process_set.size() == 1:
            one.reduce(False, "")
        else:
            by_set.setdefault(tuple(process_set.ranks or ()), []).append(one)
    for ranks in sorted(by_set):
        _reduce_of_set(by_set[ranks], broken)


def _reduce_of_set(reached: list[Reducer], broken: bool) -> None:
    process_set = reached[0].process_set()
    communicator = process_set.communicator
    known = _known.get(communicator)
    if known is None or known.joins != joins():  # ranks that had joined have counted fewer passes
        known = _known[communicator] = _Known()
    known.passes += 1
    name = f"backward pass {known.passes}"
    by_slot: dict[int, list[Reducer]] = {}
    for one in reached:
        by_slot.setdefault(known.slot(one), []).append(one)
    counts: dict[int, int] = {}
    for slot, ones in by_slot.items():
        reach = [one.reach() for one in ones]
        counts[slot] = any(some for some, _ in reach) + _ALL * all(every for _, every in reach)
    nested, has_new = any(one.nested for one in reached), any(slot < 0 for slot in by_slot)
    own, slots = process_set.rank(), range(min(known.added, _MOST))
    numbers = [1, int(broken), broken * (own + 1), int(nested), int(has_new), *(counts.get(slot, 0) for slot in slots)]
    ranks, raised, which, any_nested, any_new, *sums = allreduce_numbers(numbers, ReduceOp.SUM, name, process_set)
    by_number = list(zip(slots, sums, strict=True))
    if any_new:
        slots = range(-_NEW, 0)
        numbers = [counts.get(slot, 0) for slot in slots]
        by_number += zip(
            slots, allreduce_numbers(numbers, ReduceOp.SUM, f"{name}, new optimizers", process_set), strict=True
        )
    for slot, reaching in by_number:
        if not reaching:
            continue
        ones = by_slot.get(slot) or [one for one in (known.at(slot),) if one is not None and _is_in(one, communicator)]
        for one in ones:
            one.nested = one.nested or bool(any_nested)
            if not raised or one.sends_early:  # after an exception too, because a rank may have begun to send
                one.reduce(reaching // _ALL < ranks or len(ones) > 1, name)
            known.add(one)
            if raised:
                one.drop()
    if raised and not broken:
        culprit = f"rank {(process_set.ranks or [])[which - 1]}" if raised == 1 else f"{raised} ranks"
        raise RuntimeError(
            f"rank {(process_set.ranks or [])[own]}: {name} has no averages, because the backward pass of {culprit} "
            "raised an exception; its gradients are dropped here too. To leave out a batch that fails, catch the "
            "exception of backward() on all ranks, and call zero_grad()"
        )
