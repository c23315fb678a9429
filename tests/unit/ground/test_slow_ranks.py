"""Which rank is slow, and why, from what each has measured of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ring_notebook.slow_ranks import CAUSES, cause, find
from ring_notebook.spent import OwnTime, Spent, spent

# Ten seconds of two ranks: the slow one works for nine, the other for four and waits for five.
SLOW = Spent(10.0, 1.0, 0.0, 0.0, 0.0, OwnTime(on_cpu=10.0, samples=100))
USUAL = Spent(10.0, 1.0, 5.0, 0.0, 0.0, OwnTime(on_cpu=5.0, samples=100))


def slow(data: float = 0.0, **own: float) -> Spent:
    return replace(SLOW, data=data, own=replace(SLOW.own, **own))


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (slow(), "compute"),
        (slow(data=4.0), "data"),
        (slow(data=4.0, on_cpu=6.0), "data"),
        (slow(on_cpu=6.0, queued=4.0), "queued"),
        (slow(on_cpu=6.0, queued=4.0, throttled=3.5), "throttled"),
        (slow(on_cpu=6.0, queued=4.0, throttled=1.0), "queued"),
        (slow(on_cpu=6.0, queued=4.0, throttled=40.0), "throttled"),
        (slow(collecting=3.0), "garbage"),
        (slow(on_cpu=6.0), "asleep"),
        (slow(on_cpu=6.0, faults=1000), "memory"),
        (slow(faults=40_000), "memory"),
        (slow(faults=1000), "compute"),
        (slow(on_cpu=6.0, disk=5e7), "disk"),
        (slow(on_cpu=6.0, beside=3.5), "threads"),
        (slow(samples=200), "samples"),
        (slow(samples=102), "compute"),
        (slow(on_cpu=6.0, samples=200), "asleep"),
        (slow(on_cpu=8.5, queued=1.2, data=0.9, collecting=0.9), "compute"),
        (replace(SLOW, own=OwnTime()), "compute"),
    ],
)
def test_the_cause_explains_most_of_what_a_rank_takes_longer(rank: Spent, expected: str) -> None:
    assert cause(rank, USUAL) == expected


def test_the_usual_rank_has_its_share_of_everything() -> None:
    """What both ranks have explains nothing."""
    own = OwnTime(on_cpu=3.0, queued=2.0, throttled=2.0, collecting=1.0, faults=1000, disk=1e9)
    usual = replace(USUAL, own=own)
    assert cause(replace(SLOW, own=replace(own, on_cpu=8.0)), usual) == "compute"


def test_each_cause_is_a_sentence_with_something_to_do() -> None:
    found = find({0: USUAL, 1: SLOW, 2: USUAL}, 100)
    assert found is not None
    for name, (why, advice) in CAUSES.items():
        said = replace(found, cause=name).sentence
        assert said == f"rank 1 is 2.2x slower {why}; the others wait 50%. {advice}"


def test_a_rank_beside_which_the_others_do_nearly_nothing() -> None:
    found = find({0: replace(USUAL, waiting=8.98), 1: SLOW}, 100)
    assert found is not None
    assert found.sentence.startswith("rank 1 is over 10x slower in compute; the others wait 90%")


def test_nobody_is_slow_in_the_first_steps_or_seconds() -> None:
    assert find({0: USUAL, 1: SLOW}, 9) is None
    assert find({0: replace(USUAL, seconds=3.0), 1: replace(SLOW, seconds=3.0)}, 100) is None
    assert find({1: SLOW}, 100) is None


def test_a_rank_reports_numbers_only() -> None:
    account = spent({"training": 9.0, "queued": 2.0, "on_cpu": "many", "samples": 5}, 1.0)
    assert account.own == OwnTime(queued=2.0, samples=5.0)
