"""Makes of a DataLoader, for `prepare(logical=...)`, one that yields batches of this rank's logical ranks in turn."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from copy import copy
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import BatchSampler, DataLoader

from ring_notebook.api.objects import without_others
from ring_notebook.core.gradient_log import gradient_log
from ring_notebook.core.logical_ranks import LogicalRanks
from ring_notebook.torch.optimizer.scalers_and_schedules import act_once
from ring_notebook.torch.training.loaders import PreparedLoader, blank, nested, shard
from ring_notebook.torch.training.rank_shares import SeededSampler, ShardedSampler

T = TypeVar("T")

_in_use: list[weakref.ref[TurnsLoader[Any]]] = []
_ORDER = ("epoch", "used", "_first", "_known", "_pinned", "_left")
"""The attributes of a sampler that decide what the next pass draws."""


def shard_by_turns(
    loader: DataLoader[T], logical: LogicalRanks, *, kind: str | None = None, number: int = 0
) -> DataLoader[T]:
    """``loader`` over the shares of this rank's logical ranks, divided as by `shard`.

    Each logical rank has its own loader and workers, which draw its random numbers: its batches do not depend on the
    rank that carries it. Raises TypeError for samplers that only rank 0 draws from, and ValueError for a loader that is
    divided already.
    """
    if isinstance(loader, TurnsLoader):
        if (loader.logical.number, loader.logical.ranks) == (logical.number, logical.ranks):
            loader.logical = logical
            return loader
        made_again = shard_by_turns(loader._of, logical, kind=kind, number=number)
        cast(TurnsLoader[T], made_again).load_state_dict(loader.position()["state"])
        return made_again
    shares = _shares(loader, logical, range(logical.turns), kind, number)
    for made in shares:
        is_divided = isinstance(loader, PreparedLoader) or not isinstance(made, PreparedLoader)
        if is_divided or made._preparation._share is None:
            raise ValueError(
                "prepare(logical=...) divides the data itself: pass a loader over all of it, which no sampler and no "
                "other call of prepare has divided"
            )
        if isinstance(made._preparation._share, ShardedSampler):
            raise TypeError(
                f"prepare(logical=...) cannot divide what {type(made._preparation._share._given).__name__} draws: only "
                "the samplers of torch draw alike for all logical ranks; use one of these"
            )
    return _whole(loader, shares[0], _made=shares, logical=logical, _how=(kind, number), _kept=None)  # type: ignore[no-any-return]


def _whole(of: Any, like: Any, **own: Any) -> Any:
    whole: Any = blank(TurnsLoader, type(of))
    vars(whole).update(vars(like), _iterator=None, _of=of, _pass=None, **own)
    _in_use.append(weakref.ref(whole))
    return whole


def loaders_in_use() -> list[TurnsLoader[Any]]:
    """The `TurnsLoader` objects of this process, in the order of their creation."""
    return [one for ref in _in_use if (one := ref()) is not None]


def _shares(
    loader: DataLoader[T], logical: LogicalRanks, turns: Iterable[int], kind: str | None, number: int
) -> list[Any]:
    made: list[Any] = []
    for turn in turns:
        has_others = turn < logical.number // logical.ranks  # else some ranks do not have this turn
        with logical.shares(turn), nullcontext() if has_others else without_others():
            made.append(shard(loader if turn == 0 else _twin(loader), kind=kind, number=number))
    return made


class TurnsLoader(PreparedLoader[T]):
    """What `shard_by_turns` returns; its length counts the batches of all turns."""

    _made: list[Any]
    logical: LogicalRanks
    _of: Any
    _how: tuple[str | None, int]
    _kept: dict[str, Any] | None
    """After unpickling: the position, until ranks use the loader and make its shares."""
    _pass: object
    """A new object for each pass that is in progress, or to be continued; else None."""

    @property
    def _shares(self) -> list[Any]:
        self.logical.check()
        if (kept := self._kept) is not None:
            self._kept = None
            self.divide()
            self.continue_at(kept)
        return self._made

    def __iter__(self) -> Any:
        return self._in_turns()

    def __len__(self) -> int:
        with self.logical.shares(0):
            return len(self._shares[0]) * self.logical.turns

    def _in_turns(self) -> Iterator[Any]:
        logical, shares = self.logical, self._shares
        act_once()
        self._follow_first()
        passes: list[Any] = [None] * logical.turns
        own = self._pass = object()
        try:
            with logical.loop() as turns:
                while True:
                    for turn, _ in enumerate(turns()):
                        with logical.shares(turn):
                            if passes[turn] is None:
                                passes[turn] = iter(shares[turn])
                            try:
                                batch = next(passes[turn])
                            except StopIteration:
                                return
                        gradient_log.before_batch()
                        yield batch
        finally:
            if self._pass is own:
                self._pass = None

    def before_next_pass(self, call: Callable[[], object]) -> None:
        """As the base class, in the turn of each logical rank."""
        for one in self._shares:
            one.before_next_pass(call)

    def _follow_first(self) -> None:
        """Begin the pass with the same order in all shares, even if a loop has left the last pass within a round."""
        first, *others = self._shares
        generators = [one.get_state() for one in _generators_of(first)]
        for other in others:
            own, of_first = other._preparation._share, first._preparation._share
            if isinstance(own, SeededSampler):
                vars(own).update({name: vars(of_first)[name] for name in _ORDER})
            for generator, state in zip(_generators_of(other), generators, strict=True):
                generator.set_state(state)

    def state_dict(self, *, is_in_pass: bool = True) -> dict[str, Any]:
        """As the base class, between two rounds; it holds for any number of ranks."""
        with self.logical.shares(0):
            state: dict[str, Any] = self._shares[0].state_dict(is_in_pass=is_in_pass)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the base class."""
        for turn, one in enumerate(self._shares):
            with self.logical.shares(turn):
                one.load_state_dict(state_dict)

    def divide(self) -> None:
        """Make as many shares as this rank has logical ranks now; a pass in progress ends."""
        turns = self.logical.turns
        with without_others():
            self._made += _shares(self._of, self.logical, range(len(self._made), turns), *self._how)
        del self._made[turns:]

    def position(self) -> dict[str, Any]:
        """The loader's position, for `continue_at` on another number of ranks."""
        if self._kept is not None:
            return self._kept
        about = self._made[0]._preparation
        is_in_pass = self._pass is not None and bool(about._batches or about._loaded)
        with self.logical.shares(0):
            return {"state": self._made[0].state_dict(is_in_pass=is_in_pass), "is_in_pass": is_in_pass}

    def continue_at(self, position: dict[str, Any]) -> None:
        """Continue at ``position``; in the middle of a pass, logical ranks also restore their random numbers."""
        self.load_state_dict(position["state"])
        self._pass = object() if position["is_in_pass"] else None
        if position["is_in_pass"]:
            self.before_next_pass(self.logical.draw_again)

    @property
    def about_continuation(self) -> str:
        """As the base class."""
        with self.logical.shares(0):
            remark: str = self._shares[0].about_continuation
        return remark

    def __reduce_ex__(self, protocol: Any) -> Any:  # with its position, for any number of ranks
        return _undivided, (self._of, self.logical, self._how, self.position())


def _undivided(of: Any, logical: LogicalRanks, how: tuple[str | None, int], position: dict[str, Any]) -> Any:
    return _whole(of, of, _made=[], logical=logical, _how=how, _kept=position)


def _generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from, each once."""
    owners = [loader, *nested(loader.sampler), *nested(loader.batch_sampler)]
    found = [getattr(one, "generator", None) for one in owners]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _twin(loader: DataLoader[T]) -> DataLoader[T]:
    """A copy of the loader over the same data, whose samplers draw from copies of their generators."""
    twins: dict[int, torch.Generator] = {}
    for one in _generators_of(loader):
        twins[id(one)] = torch.Generator(one.device)
        twins[id(one)].set_state(one.get_state())

    def of(sampler: Any) -> Any:
        if sampler is None or id(sampler) in samplers:
            return samplers.get(id(sampler))
        own = samplers[id(sampler)] = copy(sampler)
        for name in ("sampler", "batch_sampler") if type(sampler) is BatchSampler else ():
            if getattr(sampler, name, None) is not None:
                setattr(own, name, of(getattr(sampler, name)))
        if isinstance(generator := getattr(own, "generator", None), torch.Generator):
            own.generator = twins.get(id(generator), generator)
        return own

    samplers: dict[int, Any] = {}
    own: Any = copy(loader)
    generator = twins.get(id(loader.generator), loader.generator)
    parts = {"sampler": of(loader.sampler), "batch_sampler": of(loader.batch_sampler), "generator": generator}
    vars(own).update(parts, _iterator=None)
    return own  # type: ignore[no-any-return]
