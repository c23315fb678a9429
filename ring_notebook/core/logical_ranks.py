"""Logical ranks: those of an experiment, carried by any smaller number of ranks. It knows no framework.

Rank r of p carries L/p consecutive logical ranks of L, or one more where p does not divide L. They take turns: in each
round every one of them has one batch, and the step of an optimizer is made in the last turn. So a round on one rank is
what L ranks do at the same time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from ring_notebook.config import config
from ring_notebook.core import metrics, step_points, world
from ring_notebook.core.gradient_log import gradient_log
from ring_notebook.core.run_options import of_run
from ring_notebook.errors import RingError

T = TypeVar("T")


class Turn(NamedTuple):
    """A turn that is in progress."""

    round: int
    """Ascending; all turns of a round have the same."""
    number: int
    """From 0; that of the logical rank among those of its rank."""


class Follower(Protocol):
    """What each logical rank has of its own, such as its random numbers."""

    def leave(self, turn: int | None) -> None:
        """Keep what belongs to the logical rank of ``turn``; for None what belongs to none of them."""

    def enter(self, turn: int | None) -> None:
        """Take what was kept of it."""

    def draw_again(self) -> None:
        """See `LogicalRanks.draw_again`."""


class LogicalRanks:
    """``number`` logical ranks, divided among the ranks of the present generation.

    Raises ValueError where there are more ranks.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.now: Turn | None = None
        """None outside of rounds."""
        self.reductions = 0
        """Of gradients since this was made; equal on all ranks, and for every number of them."""
        self.stepped: Turn | None = None
        """The turn in which an optimizer was called last to make its step."""
        self._rounds = self._divisions = 0
        self.models = 0
        """That were followed since this was made."""
        self.reducers: weakref.WeakSet[object] = weakref.WeakSet()
        """Those of optimizers that average the gradients of these logical ranks."""
        self._followers: weakref.WeakValueDictionary[str, Follower] = weakref.WeakValueDictionary()
        self.divide()

    def __reduce__(self) -> Any:
        """As so many that are divided among no ranks yet: what each of them has of its own stays behind."""
        return _undivided, (self.number, self.models)

    def divide(self, place: tuple[int, int] | None = None) -> None:
        """Divide them among the ranks of the present generation; no round is in progress any more.

        ``place`` is this rank, and of how many, where there is no generation. What logical ranks have of their own does
        not move with them. Raises as the class.
        """
        rank, ranks = place or (world.current().rank, world.current().size)
        if self.number < ranks:
            raise ValueError(
                f"rank {rank}: logical={self.number} on {ranks} ranks: each rank carries at least one logical "
                f"rank; start at most {self.number} {'rank' if self.number == 1 else 'ranks'}"
            )
        self.rank, self.ranks = rank, ranks
        self.first, self.turns = self.of_rank(rank)
        """The first logical rank of this rank, and the turns of a round: how many it has."""
        self._divisions += 1
        self.now = None
        step_points.hold(False)
        metrics.forget_turns()

    def of_rank(self, rank: int) -> tuple[int, int]:
        """The first logical rank of ``rank``, and how many it has."""
        first, end = (one * self.number // self.ranks for one in (rank, rank + 1))
        return first, end - first

    def check(self) -> None:
        """Raise RingError where the ranks are no more those among which the logical ranks were divided."""
        here = world.current()
        if (here.rank, here.size) != (self.rank, self.ranks):
            raise RingError(
                f"rank {here.rank} of {here.size}: {self.number} logical ranks were divided among {self.ranks} ranks; "
                "call prepare() again on the ranks of this run"
            )

    def follow(self, name: str, follower: Follower) -> None:
        """Have ``follower`` hear of turns, in the place of another one of this name. It is not kept alive."""
        self._followers[name] = follower

    def require(self, what: str) -> Turn:
        """The turn in progress. Raises RuntimeError outside of one: ``what`` belongs to no logical rank."""
        if self.now is None:
            raise RuntimeError(
                f"rank {self.rank}: {what} outside of a turn: {self.number} logical ranks take turns in a loop over a "
                "loader that prepare(..., logical=...) has returned, or over logical_turns(range(steps))"
            )
        return self.now

    @property
    def is_between(self) -> bool:
        """Whether a turn is in progress that is not the last one of its round."""
        return self.now is not None and self.now.number != self.turns - 1

    @contextmanager
    def loop(self) -> Iterator[Callable[[], Iterator[None]]]:
        """A loop of rounds; yields a function that gives the turns of the next round.

        Behind it the turn is in progress that was before.
        """
        self.check()
        metrics.note_params(logical_ranks=self.number)
        before, held, division = self.now, step_points.is_held(), self._divisions

        def turns() -> Iterator[None]:
            step_points.hold(held)
            step_points.between_steps()
            self._rounds += 1
            number = self._rounds
            for turn in range(self.turns):
                self.enter(Turn(number, turn))
                yield

        try:
            yield turns
        finally:
            if division == self._divisions:  # else a failure has left it behind
                self.enter(before)
                step_points.hold(held)

    def enter(self, turn: Turn | None) -> None:
        """Begin a turn, or with None leave them."""
        before, self.now = self.now, turn
        step_points.hold(turn is not None)
        metrics.note_turn(None if turn is None else (self.first + turn.number, turn.number))
        left, entered = (None if one is None else one.number for one in (before, turn))
        if left != entered:
            for follower in list(self._followers.values()):
                follower.leave(left)
            for follower in list(self._followers.values()):
                follower.enter(entered)

    def draw_again(self) -> None:
        """In the first turn behind a continuation: draw what comes next in the training that is continued.

        A pass over a loader that begins anew, to go on in its middle, has drawn numbers for its workers.
        """
        for follower in list(self._followers.values()):
            follower.draw_again()

    @contextmanager
    def shares(self, turn: int) -> Iterator[None]:
        """A context in which data is divided among the logical ranks, for the one of ``turn``."""
        global _share
        before, _share = _share, _Share(self.first + turn, self.number, self)
        try:
            yield
        finally:
            _share = before


def _undivided(number: int, models: int) -> LogicalRanks:
    made = object.__new__(LogicalRanks)
    vars(made).update(number=number, models=models, rank=0, ranks=0, turns=0, first=0)
    vars(made).update(now=None, reductions=0, stepped=None, _rounds=0, _divisions=0)
    vars(made).update(reducers=weakref.WeakSet(), _followers=weakref.WeakValueDictionary())
    return made


@dataclass(frozen=True, slots=True)
class _Share:
    rank: int
    size: int
    of: LogicalRanks


_current: LogicalRanks | None = None
_share: _Share | None = None


def number_of(logical: int | None) -> int:
    """The number of logical ranks of ``prepare(logical=...)``; by default that of the run; 0 for none.

    Raises TypeError or ValueError for anything but a positive integer.
    """
    of_the_run = of_run.take("logical")
    if logical is None:
        return of_the_run or config().logical
    if not isinstance(logical, int) or isinstance(logical, bool):
        raise TypeError(f"logical must be an integer, the number of logical ranks, got {logical!r}")
    if logical < 1:
        raise ValueError(f"logical must be at least 1, got {logical}")
    return logical


def logical_ranks(number: int) -> LogicalRanks:
    """Those in use if they are so many on the same ranks; else new ones, in use from now on."""
    global _current
    known, here = _current, world.current()
    if known is None or (known.number, known.rank, known.ranks) != (number, here.rank, here.size):
        _current = LogicalRanks(number)
    assert _current is not None
    return _current


def in_use() -> LogicalRanks | None:
    """Those in use, on whatever ranks."""
    return _current


def use(logical: LogicalRanks) -> None:
    """Have these in use from now on."""
    global _current
    _current = logical


def divided() -> LogicalRanks | None:
    """Those in use on other ranks, if any, divided among the ranks of this generation. Raises as the class."""
    if _current is not None:
        _current.divide()
    return _current


def current() -> LogicalRanks | None:
    """The logical ranks in use on the ranks of this generation."""
    known = _current
    if known is None or not world.is_initialized():
        return None
    here = world.current()
    return known if (known.rank, known.ranks) == (here.rank, here.size) else None


def logical_rank() -> int:
    """The logical rank whose turn it is; outside of turns the first one of this rank. Beyond Horovod.

    Without ``prepare(logical=...)`` it is `rank`. Raises NotInitializedError before ``init()``.
    """
    known = current()
    if known is None:
        return world.current().rank
    return known.first + (0 if known.now is None else known.now.number)


def logical_size() -> int:
    """The number of logical ranks; without ``prepare(logical=...)`` it is `size`. Beyond Horovod.

    Raises NotInitializedError before ``init()``.
    """
    known = current()
    return world.current().size if known is None else known.number


def logical_turns(steps: Iterable[T]) -> Iterator[T]:
    """Each of ``steps`` once for every logical rank of this rank, in its turn: for loops without a prepared loader.

    ``for step in logical_turns(range(100)):`` with `logical_rank` to make the batch of. Without logical ranks it yields
    ``steps``. Beyond Horovod. Raises NotInitializedError before ``init()``, and RingError on other ranks than those
    that `prepare` was called on.
    """
    world.current()
    if _current is None:
        yield from steps
        return
    with _current.loop() as turns:
        for step in steps:
            for _ in turns():
                gradient_log.before_batch()
                yield step


def share_rank() -> int:
    """The index of the share of data that is being read: this rank's, or that of the logical rank of a turn."""
    return world.current().rank if _share is None else _share.rank


def share_size() -> int:
    return world.current().size if _share is None else _share.size


def progress() -> float:
    """A number that changes as soon as all ranks have done something together."""
    return world.communication() if _share is None else _share.of.reductions
