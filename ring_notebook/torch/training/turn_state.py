"""The state of each logical rank while others take turns on its rank: random numbers, and buffers of models."""

from __future__ import annotations

import pickle
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import cloudpickle
import torch
from torch import Tensor, nn

from ring_notebook.api.objects import broadcast_object, gather_objects
from ring_notebook.api.process_sets import global_process_set
from ring_notebook.core import world
from ring_notebook.core.logical_ranks import LogicalRanks, before_rounds, current, divided, in_use, use
from ring_notebook.torch.devices import accelerator
from ring_notebook.torch.optimizer.scalers_and_schedules import act_once
from ring_notebook.torch.steps.state_digest import is_shared
from ring_notebook.torch.training.agreed_numbers import sources
from ring_notebook.torch.training.turns_loader import loaders_in_use

_LOADERS = "loaders"
_NUMBERS = -1  # key of the random numbers among followers; models have keys from 0
_numbers: RandomNumbers | None = None
_buffers: WeakKeyDictionary[nn.Module, Buffers] = WeakKeyDictionary()


def begin_turns(logical: LogicalRanks) -> None:
    """Give each logical rank random numbers, and torch the `_Kernels` of logical ranks; all ranks call it.

    Within a turn, for instance when a loop prepares another loader, the random numbers do not change.
    """
    global _numbers
    _kernels.put_back()  # first, as the program may have changed the threads since an earlier call
    _kernels.use()
    act_once()
    if logical.now is None:
        _numbers = RandomNumbers(logical)
        logical.follow("random numbers", _numbers)


class _Kernels:
    """How torch computes in rounds of logical ranks, until this rank leaves the generation.

    With another number of threads than one its kernels may add in another order. It uses deterministic kernels, and
    warns of operations that have none. Filling uninitialized memory, which only helps to find bugs, costs time.
    """

    def __init__(self) -> None:
        self._before: tuple[int, bool, bool] | None = None

    def use(self) -> None:
        if self._before is not None:
            return
        deterministic: Any = torch.utils.deterministic
        is_new = not torch.are_deterministic_algorithms_enabled()
        self._before = torch.get_num_threads(), is_new, deterministic.fill_uninitialized_memory
        torch.set_num_threads(1)
        if is_new:
            torch.use_deterministic_algorithms(True, warn_only=True)
            deterministic.fill_uninitialized_memory = False

    def put_back(self) -> None:
        """Restore what was before, unless the program has changed it since."""
        if self._before is None:
            return
        (threads, is_new, fill), self._before = self._before, None
        if torch.get_num_threads() == 1:
            torch.set_num_threads(threads)
        if is_new and torch.is_deterministic_algorithms_warn_only_enabled():
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


_kernels = _Kernels()
before_rounds(_kernels.use)
world.at_close(_kernels.put_back)


def follow_buffers(logical: LogicalRanks, model: nn.Module) -> None:
    """Give each logical rank its own values of the buffers of ``model``."""
    _follow(model, Buffers(logical, model))


def _follow(model: nn.Module, buffers: Buffers) -> None:
    _buffers[model] = buffers
    buffers.logical.follow(f"buffers {id(model)}", buffers)


def kept_turns(logical: LogicalRanks, models: Iterable[nn.Module]) -> list[bytes]:
    """The present state of each logical rank of this rank, and last the state outside of turns.

    For `continue_turns`, on any number of ranks.
    """
    return _kept(logical, _followers(models))


def continue_turns(models: Iterable[nn.Module], kept: Sequence[bytes]) -> None:
    """Outside of turns: restore this rank's logical ranks from the result of `kept_turns`."""
    _continue(_followers(models), kept)


@dataclass
class OfRank:
    """The state of the logical ranks on ``rank`` of ``ranks``, of ``number`` logical ranks in all: see `kept_turns`.

    Models are known by their number.
    """

    number: int
    rank: int
    ranks: int
    kept: list[bytes]


def for_snapshot() -> tuple[Any, OfRank] | None:
    """The state of logical ranks for a snapshot and `from_snapshot`; None if nothing trains with logical ranks.

    The first part belongs to the variables of this rank, the second to all ranks.
    """
    logical = in_use()
    if logical is None or _numbers is None or _numbers.logical is not logical:
        return None
    buffers = {model: one for model, one in _buffers.items() if one.logical is logical}
    if not (buffers or logical.reducers or any(one.logical is logical for one in loaders_in_use())):
        return None
    kept = _kept(logical, _by_number(_numbers, buffers.values()))
    return (_numbers, buffers), OfRank(logical.number, logical.rank, logical.ranks, kept)


def from_snapshot(objects: Any, own: OfRank, of_ranks: Sequence[OfRank | None], place: tuple[int, int]) -> None:
    """Divide the logical ranks of a snapshot among the present ranks (``place``: this rank, and how many).

    With as many ranks as then, each rank has its old logical ranks. With more ranks than logical ranks, nothing is
    restored, and `prepare` makes new ones.
    """
    global _numbers
    numbers, buffers = objects
    logical: LogicalRanks = numbers.logical
    place = (own.rank, own.ranks) if place[1] == len(of_ranks) else place
    kept: dict[int, bytes] = {}
    for one in of_ranks:
        if one is not None and (one.number, one.ranks) == (own.number, own.ranks):
            kept |= enumerate(one.kept[:-1], one.rank * one.number // one.ranks)
    if logical.number < place[1] or len(kept) < logical.number:
        return
    logical.divide(place)
    use(logical)
    _numbers = numbers
    logical.follow("random numbers", numbers)
    for model, one in buffers.items():
        one.begin()
        _follow(model, one)
    turns = [kept[logical.first + turn] for turn in range(logical.turns)]
    _continue(_by_number(numbers, buffers.values()), [*turns, own.kept[-1]])


def _by_number(numbers: RandomNumbers, buffers: Iterable[Buffers]) -> dict[int, RandomNumbers | Buffers]:
    return {_NUMBERS: numbers, **{one.number: one for one in buffers}}


def _kept(logical: LogicalRanks, followers: Mapping[int, RandomNumbers | Buffers]) -> list[bytes]:
    now = None if logical.now is None else logical.now.number
    for one in followers.values():
        one.leave(now)
    return [
        cloudpickle.dumps({key: one.kept_of(turn) for key, one in followers.items()})
        for turn in (*range(logical.turns), None)
    ]


def _continue(followers: Mapping[int, RandomNumbers | Buffers], kept: Sequence[bytes]) -> None:
    for one in followers.values():
        one.forget()
    for turn, data in zip((*range(len(kept) - 1), None), kept, strict=True):
        for key, state in cloudpickle.loads(data).items():
            if key in followers:
                followers[key].keep(turn, state)
    for one in followers.values():
        one.enter(None)
    assert _numbers is not None
    _numbers.begun_at = {turn: _numbers.kept_of(turn) for turn in range(len(kept) - 1)}


class ElasticTurns:
    """The state of all logical ranks, and the positions of their loaders, for any number of ranks.

    Every rank keeps the state of all, because any rank may be lost. Without logical ranks it is empty.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    def keep(self) -> None:
        """Keep the present state, between two rounds or at the end of one; all ranks call it."""
        if (logical := current()) is None or _numbers is None:
            return
        turns = [logical.first + turn for turn in range(logical.turns)]
        own = dict(zip((*turns, None), kept_turns(logical, _buffers), strict=True))
        if logical.rank != 0:
            del own[None]
        rows = gather_objects(own, "logical ranks", global_process_set)
        self._kept = {rank: kept for row in rows for rank, kept in row.items()}
        self._kept[_LOADERS] = [one.position() for one in loaders_in_use()]

    def divide(self) -> None:
        """Divide the logical ranks among the ranks of this generation, and restore the kept state."""
        if (logical := divided()) is None or _numbers is None:
            return
        for loader in loaders_in_use():
            loader.divide()
        if not self._kept:
            return
        own = [self._kept[logical.first + turn] for turn in range(logical.turns)]
        continue_turns(_buffers, [*own, self._kept[None]])
        for loader, position in zip(loaders_in_use(), self._kept[_LOADERS], strict=False):
            loader.continue_at(position)

    def state_dict(self) -> dict[Any, Any]:
        """The kept state."""
        return self._kept

    def load_state_dict(self, kept: dict[Any, Any]) -> None:
        """Take over a kept state, for `divide`."""
        self._kept = kept


def _followers(models: Iterable[nn.Module]) -> dict[int, RandomNumbers | Buffers]:
    assert _numbers is not None
    return {_NUMBERS: _numbers, **dict(enumerate(_buffers[model] for model in models if model in _buffers))}


def _gone() -> None:
    """Replaces a reference to a deleted module."""


class RandomNumbers:
    """Each logical rank's random numbers of Python, numpy and torch, including this rank's GPU.

    They are seeded from rank 0's present random numbers and the number of the logical rank, so other ranks may be
    seeded in any way. Outside of turns all ranks draw rank 0's numbers.
    """

    def __init__(self, logical: LogicalRanks) -> None:
        known = _sources()
        at_rank_0 = broadcast_object({name: read() for name, (read, _) in known.items()}, name="random numbers")
        for name, state in at_rank_0.items():
            if name in known:
                known[name][1](state)
        self._seeds = {name: pickle.dumps(_plain(state)) for name, state in at_rank_0.items()}
        self.logical = logical
        self.begun_at: dict[int, dict[str, Any]] = {}
        """The states with which turns have continued."""
        self._kept: dict[int | None, dict[str, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:  # for a snapshot, which keeps the states of turns separately
        return {**self.__dict__, "begun_at": {}, "_kept": {}}

    def leave(self, turn: int | None) -> None:
        self._kept[turn] = {name: read() for name, (read, _) in _sources().items()}

    def enter(self, turn: int | None) -> None:
        self._set(self.kept_of(turn))

    def forget(self) -> None:
        """Drop the states of logical ranks on this rank."""
        self._kept = {}

    def draw_again(self) -> None:
        if self.logical.now is not None:
            self._set(self.begun_at.pop(self.logical.now.number, {}))

    def _set(self, kept: dict[str, Any]) -> None:
        for name, (_, set_to) in _sources().items():
            if isinstance(kept.get(name), int):
                _seed(name, kept[name])
            elif name in kept:
                set_to(kept[name])

    def kept_of(self, turn: int | None) -> dict[str, Any]:
        """The states by source; seeds for sources that nothing has drawn from."""
        seeds = {} if turn is None else {name: self._seed_of(name, turn) for name in _sources()}
        return seeds | self._kept.get(turn, {})

    def keep(self, turn: int | None, kept: dict[str, Any]) -> None:
        """Take the result of `kept_of`, perhaps from another rank."""
        self._kept[turn] = kept

    def _seed_of(self, name: str, turn: int) -> int:
        text = self._seeds.get(name, b"") + f" {name} {self.logical.first + turn}".encode()
        return int.from_bytes(blake2b(text, digest_size=4).digest(), "big")


def _sources() -> dict[str, Any]:
    found = sources()
    if kind := accelerator():
        module = getattr(torch, kind)
        found["device"] = module.get_rng_state, module.set_rng_state
    return found


def _plain(state: Any) -> Any:
    return state.tolist() if isinstance(state, Tensor) else state


def _seed(name: str, seed: int) -> None:
    if name == "torch":
        torch.default_generator.manual_seed(seed)
    elif name == "python":
        random.seed(seed)
    elif name == "numpy":
        sys.modules["numpy"].random.seed(seed)
    else:
        getattr(torch, accelerator() or "").manual_seed(seed)


class Buffers:
    """Each logical rank's values of a model's buffers, for buffers that a turn has changed.

    Statistics of a batch norm are always included, because a kernel may change them without torch's knowledge. Outside
    of turns the model has the values of the first logical rank of its rank. A change outside, for instance by
    ``load_state_dict``, reaches all logical ranks of the rank.
    """

    def __init__(self, logical: LogicalRanks, model: nn.Module) -> None:
        self._places: list[tuple[Callable[[], nn.Module | None], str]] = [
            (weakref.ref(module), name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)
        ]
        self._own = {number for number, (module, name) in enumerate(self._places) if not is_shared(name, module())}
        self.logical = logical
        self.number = logical.models
        logical.models += 1
        self.begin()

    def begin(self) -> None:
        """Take the model's present buffers for all logical ranks."""
        self._first = [self._value(number).detach().clone() for number in range(len(self._places))]
        self.forget()
        self._marks: list[tuple[Tensor, int]] = []
        self._mark()

    def __getstate__(self) -> dict[str, Any]:  # for a snapshot, which calls `begin` afterwards
        places = [(module(), name) for module, name in self._places]
        return {"places": places, "own": self._own, "logical": self.logical, "number": self.number}

    def __setstate__(self, state: dict[str, Any]) -> None:
        places: list[tuple[nn.Module | None, str]] = state["places"]
        self._places = [(_gone if module is None else weakref.ref(module), name) for module, name in places]
        self._own, self.logical, self.number = state["own"], state["logical"], state["number"]

    def leave(self, turn: int | None) -> None:
        for number, (before, version) in enumerate(self._marks):
            value = self._value(number)
            changed = value is not before or value._version != version
            if turn is None and (changed or (number in self._own and not torch.equal(value, self._of(0, number)))):
                self._first[number] = value.detach().clone()
                for kept in self._kept:
                    kept.pop(number, None)
            elif turn is not None and (changed or number in self._own):
                self._own.add(number)
                self._keep(turn, number, value)

    def enter(self, turn: int | None) -> None:
        with torch.no_grad():
            for number in self._own:
                value, here = self._of(turn or 0, number), self._value(number)
                if here.shape == value.shape and here.dtype == value.dtype and here.device == value.device:
                    here.copy_(value)
                elif (module := self._places[number][0]()) is not None:
                    setattr(module, self._places[number][1], value.clone())
        self._mark()

    def draw_again(self) -> None:
        """See `Follower`: buffers draw nothing."""

    def forget(self) -> None:
        """Drop the values of logical ranks on this rank."""
        self._kept: list[dict[int, Tensor]] = [{} for _ in range(self.logical.turns)]

    def kept_of(self, turn: int | None) -> dict[int, Tensor]:
        """The values by number, in host memory; None: the values for logical ranks without their own."""
        if turn is None:
            return {number: value.cpu() for number, value in enumerate(self._first)}
        return {number: self._of(turn, number).cpu() for number in self._own}

    def keep(self, turn: int | None, kept: dict[int, Tensor]) -> None:
        """Take the result of `kept_of`, perhaps from another rank."""
        for number, value in kept.items():
            here = value.to(self._value(number).device)
            if turn is None:
                self._first[number] = here.clone()
            else:
                self._own.add(number)
                self._keep(turn, number, here)

    def _of(self, turn: int, number: int) -> Tensor:
        return self._kept[turn].get(number, self._first[number])

    def _value(self, number: int) -> Tensor:
        """The model's present buffer; without elements if it was removed."""
        module, name = self._places[number]
        found = getattr(module(), name, None)
        return found if isinstance(found, Tensor) else torch.empty(0)

    def _keep(self, turn: int, number: int, value: Tensor) -> None:
        known = self._kept[turn].get(number)
        if known is not None and known.shape == value.shape and known.dtype == value.dtype:
            known.copy_(value.detach())
        else:
            self._kept[turn][number] = value.detach().clone()

    def _mark(self) -> None:
        self._marks = [(value, value._version) for value in map(self._value, range(len(self._places)))]
