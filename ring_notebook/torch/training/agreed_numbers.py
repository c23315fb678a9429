"""Rank 0's random numbers, which all ranks draw alike in passes over an iterable data set."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ring_notebook.api.objects import broadcast_object

_Access = tuple[Callable[[], Any], Callable[[Any], object]]
_TRIED = 100
"""Elements after which a source that a data set has not drawn from is taken as unused."""


def sources() -> dict[str, _Access]:
    """For each source of random numbers of this process: functions that read and set its state."""
    found: dict[str, _Access] = {
        "torch": (torch.default_generator.get_state, torch.default_generator.set_state),
        "python": (random.getstate, random.setstate),
    }
    if numpy := sys.modules.get("numpy"):
        found["numpy"] = (numpy.random.get_state, numpy.random.set_state)
    return found


def states() -> dict[str, Any]:
    """The states of `sources` now."""
    return {name: read() for name, (read, _) in sources().items()}


def advanced(state: Tensor) -> Tensor:
    """``state`` of a generator after a loader has drawn the seed of its workers."""
    generator = torch.Generator()
    generator.set_state(state)
    draw_seed(generator)
    return generator.get_state()


def draw_seed(generator: torch.Generator) -> int:
    """Draw as a loader does for the seed of its workers."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))


class AgreedNumbers:
    """The numbers that rank 0 would draw in a single process, for the seeds of a loader's workers and in a data set.

    The seeds come from ``generator``, whose state becomes ``state``, or from a copy of torch's random numbers. Drawing
    here does not change the random numbers of the rank. A pass that only one rank began, to look at a batch, does not
    count: the next pass draws the same again.
    """

    def __init__(
        self, generator: torch.Generator | None, state: Tensor, process: dict[str, Any], has_workers: bool
    ) -> None:
        self.is_drawn_by_loader = generator is not None or has_workers
        self.generator = torch.Generator() if generator is None else generator
        self.generator.set_state(state)
        self._torch = self.generator
        if generator is not None:
            self._torch = torch.Generator()
            self._torch.set_state(process["torch"])
        self._others = {name: one for name, one in process.items() if name != "torch"}
        self._is_users = generator is not None
        self._next = self._states()
        self._left = state
        self.counts = False
        """Whether all ranks take part in the pass in progress."""

    def begin(self) -> None:
        """Begin a pass, before the loader draws the seed of its workers.

        If a program has seeded its generator, or drawn from it, rank 0 sends its state: all ranks must begin the pass.
        """
        now = self.generator.get_state()
        state, of_torch, self._others = self._states() if self.counts else self._next
        if self._is_users and not torch.equal(now, self._left):
            state = broadcast_object(now, name="state of the generator of a loader")
        self._torch.set_state(of_torch)
        self.generator.set_state(state)
        self._next, self._left, self.counts = self._states(), state, False
        if not self.is_drawn_by_loader:
            draw_seed(self.generator)

    def has_drawn(self) -> None:
        """Note the state of the generator after the loader has drawn."""
        self._left = self.generator.get_state()

    def drawn_by(self, dataset: Iterable[Any]) -> Iterator[Any]:
        """The elements of ``dataset``, which draws these numbers instead of the rank's."""
        return _Elements(self, dataset)

    @contextmanager
    def in_use(self, names: Iterable[str]) -> Iterator[None]:
        """A context in which the sources ``names`` of this process draw these numbers."""
        known = sources()
        own = {name: known[name][0]() for name in names}
        for name in own:
            known[name][1](self._torch.get_state() if name == "torch" else self._others[name])
        try:
            yield
        finally:
            for name, state in own.items():
                drawn = known[name][0]()
                if name == "torch":
                    self._torch.set_state(drawn)
                else:
                    self._others[name] = drawn
                known[name][1](state)

    def now(self) -> dict[str, Any]:
        """The state of each source."""
        return {"torch": self._torch.get_state(), **self._others}

    def set_now(self, numbers: dict[str, Any]) -> None:
        """Continue the pass in progress with the states ``numbers``, which `now` returned at another time."""
        self._torch.set_state(numbers["torch"])
        self._others |= {name: one for name, one in numbers.items() if name in self._others}

    def at_begin(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """The states when the pass in progress began, for `continue_with`."""
        return self._next

    def continue_with(self, at_begin: tuple[Tensor, Tensor, dict[str, Any]]) -> None:
        """Have the next pass begin like the pass in which `at_begin` was called."""
        self._next, self._left, self.counts = at_begin, at_begin[0], False
        self.generator.set_state(at_begin[0])

    def _states(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        return self.generator.get_state(), self._torch.get_state(), dict(self._others)


class _Elements:
    """The elements of a data set that draws agreed numbers."""

    def __init__(self, numbers: AgreedNumbers, dataset: Iterable[Any]) -> None:
        self._numbers = numbers
        self._names = [name for name in numbers.now() if name in sources()]
        self._at_first = numbers.now()
        self._came = 0
        with numbers.in_use(self._names):
            self._elements = iter(dataset)

    def __iter__(self) -> _Elements:
        return self

    def __next__(self) -> Any:
        if not self._names:
            return next(self._elements)
        with self._numbers.in_use(self._names):
            element = next(self._elements)
        self._came += 1
        if self._came == _TRIED:  # switching random numbers costs more than reading many kinds of elements
            now = self._numbers.now()
            self._names = [name for name in self._names if not _are_equal(now[name], self._at_first[name])]
        return element

    def __getattr__(self, name: str) -> Any:  # for ``state_dict``, which not every iterator has
        if name.startswith("__") or "_elements" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._elements, name)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two states of a source are equal: tensors, or tuples with arrays in them."""
    if isinstance(one, tuple):
        return all(_are_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    return bool((one == other).all()) if hasattr(one, "shape") else bool(one == other)
