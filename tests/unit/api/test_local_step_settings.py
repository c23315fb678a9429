"""Settings of local steps, and which fragment is due when."""

from __future__ import annotations

import random

import pytest

from ring_notebook.api.local_steps import LocalSteps, plan_fragments, settings_of
from ring_notebook.core.run_options import of_run


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"every": 4, "fragments": 0}, "fragments must be at least 1, got 0"),
        ({"every": 4, "fragments": 5}, "5 fragments need as many steps between syncs, got every=4"),
        ({"every": 4, "fragments": 2, "delay": 2}, "less than the 2 steps between two fragments, got 2"),
        ({"every": 4, "delay": -1}, "delay must be at least 0, got -1"),
        ({"every": 4, "lr": 0.0}, "lr must be positive and finite, got 0.0"),
        ({"every": 4, "lr": float("nan")}, "lr must be positive and finite, got nan"),
        ({"every": 4, "momentum": 1.0}, "momentum must be at least 0 and less than 1, got 1.0"),
        ({"every": 4, "alpha": 1.0}, "alpha must be at least 0 and less than 1, got 1.0"),
    ],
)
def test_says_what_is_wrong(settings: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LocalSteps(**settings)  # type: ignore[arg-type]


def test_takes_integers_only() -> None:
    with pytest.raises(TypeError, match="LocalSteps: every must be an integer, got '50'"):
        LocalSteps("50")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sync_every must be an integer, got 'often'"):
        settings_of("often")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "fragments", "due"),
    [
        (LocalSteps(4), 1, {4: 0}),
        (LocalSteps(6, fragments=3), 3, {2: 0, 4: 1, 6: 2}),
        (LocalSteps(7, fragments=3), 3, {2: 0, 4: 1, 7: 2}),
        (LocalSteps(6, fragments=3), 2, {3: 0, 6: 1}),  # of a model with two parameters
        (LocalSteps(1), 1, {1: 0}),
    ],
)
def test_each_fragment_is_due_once_in_a_round(settings: LocalSteps, fragments: int, due: dict[int, int]) -> None:
    found = {position: settings.due(position, fragments) for position in range(1, settings.every + 1)}
    assert {position: number for position, number in found.items() if number is not None} == due


@pytest.mark.parametrize(
    ("sizes", "fragments", "plan"),
    [
        ([10, 10, 10, 10], 2, ((0, 1), (2, 3))),
        ([100, 1, 1, 1], 2, ((0,), (1, 2, 3))),
        ([1, 1, 1, 100], 2, ((0, 1, 2), (3,))),
        ([5], 4, ((0,),)),
        ([], 3, ()),
        ([0, 0], 2, ((0, 1),)),
    ],
)
def test_fragments(sizes: list[int], fragments: int, plan: tuple[tuple[int, ...], ...]) -> None:
    assert plan_fragments(sizes, fragments) == plan


def test_fragments_have_every_parameter_once() -> None:
    draw = random.Random(0)
    for _ in range(500):
        sizes = [draw.choice([0, 1, 64, 4096, 1_000_000]) for _ in range(draw.randrange(40))]
        plan = plan_fragments(sizes, draw.randrange(1, 12))
        assert [index for part in plan for index in part] == list(range(len(sizes)))
        assert all(plan)


def test_a_run_says_how_often() -> None:
    try:
        assert settings_of(None) is None
        of_run.begin("", "", 50, 0)
        assert of_run.is_lost("sync_every")
        assert settings_of(1) is None
        assert of_run.is_lost("sync_every")
        assert settings_of(None) == LocalSteps(50)
        assert not of_run.is_lost("sync_every")
        assert settings_of(LocalSteps(5)) == LocalSteps(5)
    finally:
        of_run.begin("", "", 1, 0)


def test_when_ranks_end_a_round_with_equal_weights() -> None:
    assert LocalSteps(50).ends_equal
    assert not LocalSteps(50, fragments=2).ends_equal
    assert not LocalSteps(50, delay=1).ends_equal
    assert LocalSteps(50, delay=1).kept == 0.5
    assert LocalSteps(50, delay=1, alpha=0.0).kept == 0.0
