"""Logical ranks: the ranks of an experiment, carried by the same or a smaller number of ranks. Knows no framework.

Rank r of p carries L/p consecutive logical ranks of L, or one more where p does not divide L. They take turns: in each
round every one of them has one batch, and the optimizer steps in the last turn. So a round on one rank does what L
ranks do at the same time.
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
    """The round's number, ascending."""
    number: int
    """The index, from 0, of the logical rank among the logical ranks of its rank."""


class Follower(Protocol):
    """Holds one kind of state of each logical rank, such as its random numbers."""

    def leave(self, turn: int | None) -> None:
        """Save the state of the logical rank of ``turn``; None: the state outside of turns."""

    def enter(self, turn: int | None) -> None:
        """Restore the state that `leave` saved for ``turn``."""

    def draw_again(self) -> None:
        """See `LogicalRanks.draw_again`."""


class LogicalRanks:
    """``number`` logical ranks, divided among the ranks of the present generation.

    Raises ValueError where there are more ranks.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.now: Turn | None = None
        """The turn in progress; None outside of rounds."""
        self.reductions = 0
        """Number of gradient reductions since this was made; equal on all ranks, and for any number of ranks."""
        self.stepped: Turn | None = None
        """The last turn in which an optimizer's ``step`` was called."""
        self._rounds = self._divisions = 0
        self.models = 0
        """Number of models followed since this was made."""
        self.reducers: weakref.WeakSet[object] = weakref.WeakSet()
        """The reducers of optimizers that average the gradients of these logical ranks."""
        self._followers: weakref.WeakValueDictionary[str, Follower] = weakref.WeakValueDictionary()
        self.divide()

    def __reduce__(self) -> Any:
        """Unpickles as the same number of logical ranks, divided among no ranks yet and without their state."""
        return _undivided, (self.number, self.models)

    def divide(self, place: tuple[int, int] | None = None) -> None:
        """Divide them among the ranks of the present generation; a round in progress ends.

        ``place`` (this rank, and how many) replaces the generation. The state of logical ranks does not move with them.
        Raises as the class.
        """
        rank, ranks = place or (world.current().rank, world.current().size)
        if self.number < ranks:
            raise ValueError(
                f"rank {rank}: logical={self.number} on {ranks} ranks: each rank carries at least one logical "
                f"rank; start at most {self.number} {'rank' if self.number == 1 else 'ranks'}"
            )
        self.rank, self.ranks = rank, ranks
        self.first, self.turns = self.of_rank(rank)
        """The first logical rank of this rank, and how many it has: the turns of a round."""
        self._divisions += 1
        self.now = None
        step_points.hold(False)
        metrics.forget_turns()

    def of_rank(self, rank: int) -> tuple[int, int]:
        """The first logical rank of ``rank``, and how many it has."""
        first, end = (one * self.number // self.ranks for one in (rank, rank + 1))
        return first, end - first

    def check(self) -> None:
        """Raise RingError if the logical ranks were divided among other ranks than the present ones."""
        here = world.current()
        if (here.rank, here.size) != (self.rank, self.ranks):
            raise RingError(
                f"rank {here.rank} of {here.size}: {self.number} logical ranks were divided among {self.ranks} ranks; "
                "call prepare() again on the ranks of this run"
            )

    def follow(self, name: str, follower: Follower) -> None:
        """Tell ``follower`` of turns; it replaces one of this name, and is held weakly."""
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
        """A loop of rounds; yields a function that yields the turns of the next round.

        After the loop, the turn that was in progress before it continues.
        """
        self.check()
        metrics.note_params(logical_ranks=self.number)
        before, held, division = self.now, step_points.is_held(), self._divisions

        def turns() -> Iterator[None]:
            step_points.hold(held)
            step_points.between_steps()
            for callback in _before_rounds:
                callback()
            self._rounds += 1
            number = self._rounds
            for turn in range(self.turns):
                self.enter(Turn(number, turn))
                yield

        try:
            yield turns
        finally:
            if division == self._divisions:  # else they were divided anew after a failure
                self.enter(before)
                step_points.hold(held)

    def enter(self, turn: Turn | None) -> None:
        """Begin a turn; None: leave the turns."""
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
        """Restore the random numbers of a resumed training, in its first turn.

        Resuming a loader's pass in its middle has drawn numbers for its workers.
        """
        for follower in list(self._followers.values()):
            follower.draw_again()

    @contextmanager
    def shares(self, turn: int) -> Iterator[None]:
        """A context in which data is divided among logical ranks, and read for the logical rank of ``turn``."""
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
_before_rounds: list[Callable[[], object]] = []


def before_rounds(callback: Callable[[], object]) -> None:
    """Register ``callback``, to be called before each round of logical ranks."""
    _before_rounds.append(callback)


def number_of(logical: int | None) -> int:
    """The number of logical ranks for ``prepare(logical=...)``, by default the run's; 0 for none.

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
    """``number`` logical ranks on the present ranks: those in use if they match, else new ones, now in use."""
    global _current
    known, here = _current, world.current()
    if known is None or (known.number, known.rank, known.ranks) != (number, here.rank, here.size):
        _current = LogicalRanks(number)
    assert _current is not None
    return _current


def in_use() -> LogicalRanks | None:
    """The logical ranks in use, even if divided among other ranks."""
    return _current


def use(logical: LogicalRanks) -> None:
    """Use ``logical`` from now on."""
    global _current
    _current = logical


def divided() -> LogicalRanks | None:
    """The logical ranks in use, if any, divided anew among the ranks of this generation. Raises as the class."""
    if _current is not None:
        _current.divide()
    return _current


def current() -> LogicalRanks | None:
    """The logical ranks in use, if divided among the ranks of this generation; else None."""
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
    """The index of the share of data to read: this rank, or the logical rank of a turn."""
    return world.current().rank if _share is None else _share.rank


def share_size() -> int:
    return world.current().size if _share is None else _share.size


def progress() -> float:
    """A number that has changed if the ranks have communicated since the last call."""
    return world.communication() if _share is None else _share.of.reductions
