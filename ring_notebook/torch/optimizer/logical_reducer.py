"""Reduces the gradients of logical ranks, which take turns, to the same bits on any number of ranks.

In each turn the gradients of the backward passes are copied to a leaf of `OrderedSum`, and ``p.grad`` becomes zeros, so
that clipping before the last turn has no effect. At the end of a pass in the last turn the ranks exchange their nodes
of the tree, each adds the rest, and ``p.grad`` is the average over all logical ranks. Another pass in a turn adds to
the gradients of that turn only. If a program does not call ``zero_grad()``, the gradients at the begin of a round are
added to its average.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ring_notebook.analysis.equal_gradients import logical_name
from ring_notebook.api.basics import joins
from ring_notebook.api.bucket_plan import ParameterSpec, agree_on_plan, plan_buckets
from ring_notebook.config import config
from ring_notebook.core import world
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.gradient_log import gradient_log
from ring_notebook.core.logical_ranks import LogicalRanks, Turn
from ring_notebook.torch.collectives.allgather import gathered
from ring_notebook.torch.collectives.alltoall import exchanged
from ring_notebook.torch.optimizer import backward_end
from ring_notebook.torch.optimizer.gradient_reducer import GradientReducer, Named
from ring_notebook.torch.optimizer.ordered_sum import OrderedSum, nodes_of, total
from ring_notebook.torch.steps.state_digest import word_sum
from ring_notebook.torch.tensors import copy_each, dtype_of, real_view

_IS_AVERAGE = "_ring_is_average"
"""Attribute of a gradient that a reduction has made."""


class _Layout:
    """The places of gradients in flat tensors, one for each bucket, and one of counts.

    The counts, a number for each parameter, say how many logical ranks have a gradient; with 0 it stays None. The
    length of flat tensors is padded to a multiple of ``parts``.
    """

    def __init__(self, named: Named, threshold: int, parts: int) -> None:
        self.named = list(named)
        self.parameters = [p for _, p in named]
        self.specs = [ParameterSpec(name, tuple(real_view(p).shape), dtype_of(real_view(p))) for name, p in named]
        by_device: dict[torch.device, list[int]] = {}
        for number, p in enumerate(self.parameters):
            by_device.setdefault(p.device, []).append(number)
        self.buckets = [
            [numbers[index] for index in plan.parameters]
            for numbers in by_device.values()
            for plan in plan_buckets([self.specs[number] for number in numbers], threshold)
        ]
        self._sizes = [sum(self.specs[number].elements for number in bucket) for bucket in self.buckets]
        self.places = {p: number for number, p in enumerate(self.parameters)}
        self.parts = parts
        self._spare: list[list[Tensor]] = []  # kept, because new pages from Linux cost more time than the sums

    def flats(self) -> list[Tensor]:
        """Flat tensors, with any content."""
        if self._spare:
            return self._spare.pop()
        made = []
        for bucket, size in zip(self.buckets, self._sizes, strict=True):
            first = real_view(self.parameters[bucket[0]])
            made.append(torch.empty(round_up(size, self.parts), dtype=first.dtype, device=first.device))
        counts = round_up(len(self.parameters), self.parts)
        return [*made, torch.empty(counts, dtype=torch.int32, device="cpu")]

    def zeros(self) -> list[Tensor]:
        """The flat tensors of a leaf without gradients."""
        flats = self.flats()
        for flat in flats:
            flat.zero_()
        return flats

    def give_back(self, flats: list[Tensor]) -> None:
        """Keep ``flats``, which nobody reads any more, for `flats`."""
        self._spare.append(flats)

    def merge(self, left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
        """The sum of both, in the memory of ``left``; gives ``right`` back."""
        for one, other in zip(left, right, strict=True):
            one.add_(other)
        self.give_back(right)
        return left

    def views(self, flats: Sequence[Tensor]) -> dict[int, Tensor]:
        """Each parameter's part, by its number and in its shape; complex ones as real numbers."""
        found: dict[int, Tensor] = {}
        for bucket, flat in zip(self.buckets, self.contents(flats), strict=True):
            parts = torch.split(flat, [self.specs[number].elements for number in bucket])
            found.update((n, part.view(self.specs[n].shape)) for n, part in zip(bucket, parts, strict=True))
        return found

    def contents(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of each bucket, without padding."""
        return [flat[:size] for flat, size in zip(flats, self._sizes, strict=False)]


class _Leaf:
    """The gradients of one logical rank in one round."""

    def __init__(self, turn: Turn, layout: _Layout) -> None:
        self.turn = turn
        self.layout = layout
        self.flats = layout.zeros()
        self.views = layout.views(self.flats)
        self.is_closed = False
        """Whether the optimizer's ``step`` was called in this turn."""
        self.is_reduced = False
        self.is_dropped = False
        """Whether ``zero_grad()`` has dropped the averages."""
        self.reached: set[Tensor] = set()
        """The parameters that passes of the turn have reached."""

    def gradient(self, parameter: Tensor) -> Tensor:
        """A copy of the gradient of ``parameter``."""
        copied = torch.empty_like(parameter)
        real_view(copied).copy_(self.views[self.layout.places[parameter]])
        return copied

    def take(self, parameters: Sequence[Tensor]) -> None:
        """Replace its gradients of ``parameters`` by their present ones."""
        numbers = [self.layout.places[p] for p in parameters]
        gradients = [real_view(p.grad.detach()) for p in parameters if p.grad is not None]
        copy_each([self.views[number] for number in numbers], gradients)
        self.flats[-1][numbers] = 1
        self.reached.update(parameters)

    def mark(self) -> Tensor:
        """The sum of all gradients as words of memory, to find gradients that differ."""
        sums = [word_sum(one) for one in self.layout.contents(self.flats)]
        return sums[0] if len(sums) == 1 else _stacked(sums).sum()

    def clear(self) -> None:
        for flat in self.flats:
            flat.zero_()
        self.reached.clear()


def round_up(number: int, to: int) -> int:
    """The next multiple of ``to``."""
    return -(-number // to) * to


def _stacked(numbers: Sequence[Tensor]) -> Tensor:
    devices = {one.device for one in numbers}
    return torch.stack([one.cpu() for one in numbers] if len(devices) > 1 else list(numbers))


def _quiet(parameter: Tensor) -> None:
    """Set a gradient to zeros instead of None: a GradScaler, or a loop that logs its norm, expects a tensor."""
    if parameter.grad is None or parameter.grad.requires_grad:
        parameter.grad = torch.zeros_like(parameter)
    else:
        parameter.grad.zero_()


class LogicalReducer(GradientReducer):
    """See the module. Its optimizer makes one step in each round."""

    sends_early = False

    def __init__(self, logical: LogicalRanks, *made_with: Any) -> None:
        super().__init__(*made_with)
        self.logical = logical
        logical.reducers.add(self)
        self._flat_layout: _Layout | None = None
        self._mark: tuple[weakref.ref[Communicator], int, _Layout, str] | None = None
        self._sum: OrderedSum[list[Tensor]] | None = None
        self._leaf: _Leaf | None = None
        self._marks: list[Tensor] = []  # of the round's leaves before the present one
        self._before: dict[Tensor, Tensor] = {}  # the gradients when the round began
        self._reached: dict[Tensor, None] = {}  # by the pass in progress

    def __reduce__(self) -> Any:
        """As the base class."""
        kind, made_with, kept = super().__reduce__()
        return kind, (self.logical, *made_with), kept

    # --- the present turn ---
    def open(self, what: str = "backward()") -> _Leaf:
        """The leaf of the turn in progress. Raises RuntimeError outside of turns."""
        turn = self.logical.require(what)
        if self._leaf is not None and self._leaf.turn == turn:
            return self._leaf
        if self._leaf is None or self._sum is None or self._leaf.turn.round != turn.round:
            layout = self._begin_round()
        else:
            layout = self._leaf.layout
            self._push(self._leaf)
        assert self._sum is not None
        while self._sum.next < self.logical.first + turn.number:  # earlier turns that made no pass
            self._push(_Leaf(turn, layout))
        self._leaf = _Leaf(turn, layout)
        return self._leaf

    def _push(self, leaf: _Leaf) -> None:
        assert self._sum is not None
        if gradient_log.is_on:
            self._marks.append(leaf.mark())
        self._sum.push(leaf.flats)

    def _begin_round(self) -> _Layout:
        self.logical.check()
        named = self._trainable()
        layout = self._flat_layout
        alike = layout is not None and [id(p) for _, p in named] == [id(p) for p in layout.parameters]
        if layout is None or not alike or layout.parts != self.logical.ranks:
            layout = self._flat_layout = _Layout(named, config().fusion_threshold, self.logical.ranks)
        if self._leaf is not None and self._sum is not None:
            for flats in (self._leaf.flats, *(value for _, _, value in self._sum.nodes)):
                self._leaf.layout.give_back(flats)
        self._sum = OrderedSum(self.logical.number, self.logical.first, layout.merge)
        self._leaf, self._marks, self._reached, self._before = None, [], {}, {}
        self._has_reduced = False
        for name, p in named:
            if p.grad is None:
                continue
            if not getattr(p.grad, _IS_AVERAGE, False) and bool(p.grad.any()):
                raise RuntimeError(
                    f"rank {self.logical.rank}: at the begin of a round of logical ranks {name} has a gradient that no "
                    "backward pass of a round has made; call optimizer.zero_grad() before, and let backward() make "
                    "gradients, or leave logical out"
                )
            self._before[p] = p.grad.detach().clone()
        return layout

    def close_turn(self, what: str) -> None:
        """Note that the optimizer's ``step`` was called: later gradients in this turn do not count for it."""
        leaf = self.open(what)
        leaf.is_closed, self.logical.stepped = True, leaf.turn

    def settle(self) -> bool:
        """As the base class: reduce in the last turn if no pass has, because none reached a parameter on this rank."""
        backward_end.end_broken()
        self._enter_generation()
        leaf = self.open("optimizer.step()")
        if self._reached:  # without `backward_end.ENDS_ARE_SEEN`
            self.end_pass()
        is_dropped = leaf.is_dropped and not leaf.reached
        if leaf.is_closed or leaf.is_reduced or is_dropped or self.logical.is_between:
            return False
        before = self._reductions
        backward_end.reduce_together([self])
        return self._reductions > before and self.logical.ranks > 1

    def forget(self) -> None:
        """As the base class, in ``zero_grad()``: drop the gradients of this turn; earlier turns stay.

        After a reduction this drops the averages, unless another pass makes gradients before the step.
        """
        backward_end.end_broken()
        self._enter_generation()
        now, leaf = self.logical.now, self._leaf
        if leaf is None or now is None or leaf.turn != now or leaf.is_closed:
            return
        leaf.clear()
        if leaf.is_reduced or now.number == 0:
            self._before = {}
        leaf.is_dropped, leaf.is_reduced = leaf.is_reduced, False

    def drop(self) -> None:
        """As the base class, for the gradients of this turn; earlier turns stay."""
        self._reached, self._before = {}, {}
        if self._leaf is not None:
            self._leaf.clear()
        for _, parameter in self._named():
            parameter.grad = None

    def _forget(self) -> None:
        super()._forget()
        self._sum, self._leaf, self._marks, self._before, self._reached = None, None, [], {}, {}

    def reset(self) -> None:
        """As the base class."""
        super().reset()
        self._flat_layout = self._mark = None

    # --- as `backward_end` sees it ---
    def end_pass(self) -> bool:
        """Take the gradients of a pass; returns whether the reduction is due."""
        leaf = self.open()
        reached = list(self._reached)
        self._reached = {}
        for p in reached:
            if p.grad is not None and p.grad.is_sparse:
                name = leaf.layout.named[leaf.layout.places[p]][0]
                raise TypeError(
                    f"rank {self.logical.rank}: the gradient of {name} is sparse, and logical ranks add dense ones; "
                    "leave sparse=True out"
                )
        with torch.no_grad():
            leaf.take([p for p in reached if p.grad is not None])
            if self.logical.is_between:
                for p in reached:
                    _quiet(p)
                return False
        return not self._paused

    def reach(self) -> tuple[bool, bool]:
        """All, because gradients of earlier turns are due too."""
        return True, True

    @torch.no_grad()
    def reduce(self, partly: bool, name: str) -> None:
        """Make ``p.grad`` the average over logical ranks; all ranks call this, in the last turn."""
        leaf = self.open()
        assert self._sum is not None
        layout = leaf.layout
        made: list[list[Tensor]] = []  # the sum with this leaf, which may change in another pass of the turn

        def add(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
            if not made:  # else `right` is the sum so far
                made.append(layout.flats())
            for one, other, out in zip(left, right, made[-1], strict=True):
                torch.add(one, other, out=out)
            return made[-1]

        here = self._sum.with_leaf(leaf.flats, add)
        flats = self._averages(layout, [value for _, _, value in here.nodes])
        counts = flats[-1].tolist()
        views = layout.views(flats)
        for number, p in enumerate(layout.parameters):
            before = self._before.get(p)
            if counts[number]:
                if p.grad is None or p.grad.requires_grad or p.grad.dtype != p.dtype:
                    p.grad = torch.empty_like(p)
                real_view(p.grad).copy_(views[number])
                if before is not None:
                    p.grad.add_(before)
            else:
                p.grad = None if before is None else before.clone()
            if p.grad is not None:
                setattr(p.grad, _IS_AVERAGE, True)
        if gradient_log.is_on:
            self._note(leaf, views)
        for one in (flats, *made):
            layout.give_back(one)
        leaf.is_reduced = True
        self._touched.clear()
        self._settled.update(layout.parameters)
        self._has_reduced = True
        self._reductions += 1
        self.logical.reductions += 1

    # --- within ---
    def _note(self, leaf: _Leaf, averages: dict[int, Tensor]) -> None:
        """Note marks of the gradients of this rank's logical ranks, and of its part of the averages."""
        logical, specs = self.logical, leaf.layout.specs
        marks = [*self._marks, leaf.mark()]
        names = [logical_name(logical.first + turn) for turn in range(len(marks))]
        for number in range(logical.rank, len(specs), logical.ranks):
            names.append(specs[number].name)
            marks.append(word_sum(averages[number]))
        gradient_log.note(leaf.turn.round, names, _stacked(marks))

    def _averages(self, layout: _Layout, nodes: list[list[Tensor]]) -> list[Tensor]:
        """The averages over all logical ranks, and how many of them have a gradient, from this rank's ``nodes``.

        Each rank adds one part of all nodes, and gets the sums of the other parts from the other ranks.
        """
        number, ranks = self.logical.number, self.logical.ranks
        places = [place for rank in range(ranks) for place in nodes_of(number, *self.logical.of_rank(rank))]
        mark = self._agreed(layout)
        averages = layout.flats()
        for index, average in enumerate(averages):
            parts = [flats[index] for flats in nodes]
            divisor = number if index < len(layout.buckets) else 1
            if ranks == 1:
                [whole] = parts
                average.copy_(whole) if divisor == 1 else torch.div(whole, divisor, out=average)
                continue
            name = f"ordered gradients {mark}, bucket {index}"
            rows = [part.view(ranks, -1) for part in parts]
            sent = rows[0] if len(rows) == 1 else torch.stack(rows, 1).flatten(0, 1)
            received, _ = exchanged(sent, [len(rows)] * ranks, f"{name}: parts", self.process_set())
            added = [(*place, row) for place, row in zip(places, received, strict=True)]
            summed = total(number, added, torch.Tensor.add_)
            if divisor != 1:
                summed.div_(divisor)
            gathered(summed, name, self.process_set(), output=average)
        return averages

    def _agreed(self, layout: _Layout) -> str:
        """The mark of the ``layout``, on which all ranks agree first."""
        if self.logical.ranks == 1:
            return ""
        communicator = self.process_set().communicator
        known = self._mark
        if known is None or known[0]() is not communicator or known[1:3] != (joins(), layout):
            _, mark = agree_on_plan(layout.specs, (self.logical.number, layout.buckets), False, self.process_set())
            known = self._mark = weakref.ref(communicator), joins(), layout, mark
        return known[3]

    @property
    def _multiplies(self) -> bool:
        return True  # so that `_before_gradient` is called

    def _before_gradient(self, parameter: Tensor) -> None:
        """Before a pass adds to the gradient: set it to the sum of earlier passes of this turn."""
        if not world.is_initialized():
            return
        backward_end.begin()  # may drop the leaf
        leaf = self.open()
        if self.logical.stepped == leaf.turn:
            raise RuntimeError(
                f"rank {self.logical.rank}: backward() after optimizer.step() in one turn: logical ranks whose turn is "
                "not the last would compute with weights that the step has not changed yet; call backward() for all "
                "losses of a batch before the first step, or leave logical out"
            )
        if parameter in self._reached or parameter not in leaf.layout.places:
            return
        parameter.grad = leaf.gradient(parameter) if parameter in leaf.reached else None

    def _on_gradient(self, parameter: Tensor) -> None:
        if not world.is_initialized():
            return
        self._enter_generation()
        leaf = self.open()
        if backward_end.ENDS_ARE_SEEN and backward_end.note(self, parameter):
            self.nested = True
        if parameter in leaf.layout.places:
            self._reached[parameter] = None
