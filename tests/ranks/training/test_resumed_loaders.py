"""Loaders of `prepare` continue in the middle of a pass: the steps that are left are those of one process."""

from __future__ import annotations

from itertools import chain, islice
from types import ModuleType
from typing import Any

import pytest
from torch.utils.data import DataLoader

from ranks.training.test_loaders import CASES, Case, Range, flat, of_numbers, passes_of_one_process, reseed, streamed
from ring_notebook.errors import RingError
from ring_notebook.torch.training.rank_shares import batches_of

BATCH, DONE = 4, 2
"""Steps of the second pass before it is left. Workers have taken equal turns then, and begin with the first again."""
FAST = (
    "plain",
    "workers",
    "own sampler",
    "own batch sampler",
    "iterable",
    "iterable, workers",
    "iterable, drawn by numpy",
)
"""The others start the same code."""
SPAWNED = {"iterable, spawned workers", "workers of a server"}
"""Interpreters of their own, which take seconds to start: `test_loaders` tries them, and what is left is the same."""
LEFT_OUT = {*SPAWNED, "workers in any order", "one pass without end", "one pass without end, workers"}
"""What came of the pass is not known. One without an end begins anew: docs/promises.md."""


class Told(Range):
    """A stream that says where it is, and is not read again."""

    at = 0

    def __iter__(self) -> Any:
        for self.at in range(self.at, self.end):  # noqa: B020
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


def steps(hvd: ModuleType, loader: Any, count: int | None = None) -> list[list[int]]:
    return [sorted(chain(*hvd.allgather_object(flat(one)))) for one in islice(loader, count)]


def prepared(hvd: ModuleType, case: Case, seed: int) -> Any:
    reseed(seed + hvd.rank())
    return hvd.prepare(case.make(BATCH, hvd.size()))


ALL = {**CASES, "told": Case(streamed(lambda count: Told(0, count)))}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in {*FAST, "told"}))
        for name in ALL
        if name not in LEFT_OUT
    ],
)
def test_the_steps_that_are_left(hvd: ModuleType, name: str) -> None:
    case = ALL[name]
    reseed(7)
    expected = passes_of_one_process(case, BATCH, hvd.size())
    first = prepared(hvd, case, 7)
    together = [steps(hvd, first)] if case.passes > 1 else []
    before = steps(hvd, first, DONE)
    state = hvd.broadcast_object(first.state_dict(), name="state")
    again = prepared(hvd, case, 100)
    again.load_state_dict(state)
    assert hvd.broadcast_object(again.state_dict(), name="state").keys() == state.keys()
    together.append(before + steps(hvd, again))
    assert together == expected[:2]
    if name == "told":
        assert again.dataset.at == 0
        assert "read again" not in again.about_continuation


def test_a_pass_that_continued_is_left_again(hvd: ModuleType) -> None:
    for name in ("plain", "own sampler", "iterable"):
        case = CASES[name]
        reseed(7)
        expected = passes_of_one_process(case, BATCH, hvd.size())[0]
        loader, found = prepared(hvd, case, 7), []
        for count in (1, 2, None):
            found += steps(hvd, loader, count)
            state = hvd.broadcast_object(loader.state_dict(), name="state")
            loader = prepared(hvd, case, 100)
            loader.load_state_dict(state)
        assert found == expected


@pytest.mark.parametrize("name", ["plain", "own sampler", "iterable", "iterable, workers"])
def test_a_pass_that_has_read_nothing_or_has_nothing_left(hvd: ModuleType, name: str) -> None:
    """The first stands where it continues; behind the second comes a whole one."""
    case = CASES[name]
    reseed(7)
    expected = passes_of_one_process(case, BATCH, hvd.size())[0]
    loader = prepared(hvd, case, 7)
    found = steps(hvd, loader, DONE)
    for _ in range(2):
        state = hvd.broadcast_object(loader.state_dict(), name="state")
        loader = prepared(hvd, case, 100)
        loader.load_state_dict(state)
        begun = iter(loader)
    found += steps(hvd, begun, len(expected) - DONE)
    assert found == expected
    state = hvd.broadcast_object(loader.state_dict(), name="state")
    loader = prepared(hvd, case, 100)
    loader.load_state_dict(state)
    assert not steps(hvd, loader)
    assert len(steps(hvd, loader)) == len(expected)


def test_states_that_do_not_fit(hvd: ModuleType) -> None:
    stream = hvd.prepare(DataLoader(Range(0, 24, splits=True), batch_size=2, num_workers=2))
    steps(hvd, stream, 1)
    state = hvd.broadcast_object(stream.state_dict(), name="state")
    with pytest.raises(RingError, match=r"num_workers=2 cannot continue with num_workers=0.*continue with 2"):
        hvd.prepare(DataLoader(Range(0, 24, splits=True), batch_size=2)).load_state_dict(state)
    with pytest.raises(RingError, match="the state was saved by another kind of loader"):
        hvd.prepare(of_numbers()(2, hvd.size())).load_state_dict(state)
    loose = hvd.prepare(of_numbers(num_workers=2, in_order=False)(2, hvd.size()))
    steps(hvd, loose, 1)
    loose.load_state_dict(hvd.broadcast_object(loose.state_dict(), name="state"))
    assert "begins its pass again: in_order=False" in loose.about_continuation


def test_which_worker_made_which_batches() -> None:
    inf = float("inf")
    assert batches_of(0, [inf]) == [0]
    assert batches_of(7, [inf]) == [7]
    assert batches_of(5, [inf, inf]) == [3, 2]
    assert batches_of(9, [2, inf, inf]) == [2, 4, 3]
    assert batches_of(9, [inf, 0, 1]) == [8, 0, 1]
    assert batches_of(9, [1, 2, 3]) == [1, 2, 3]
