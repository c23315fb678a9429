"""The model of a step gives what its formula says, is found again in runs that follow it, and refuses to guess."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf, isclose
from random import Random

import pytest

from ring_notebook.analysis.prediction import (
    BACKWARD,
    ScalingOptions,
    StepModel,
    compare,
    expected_maximum,
    fit,
    link_rate,
    predict,
    turns,
)
from ring_notebook.analysis.scaling import PARTS, Measured, Scaling

GBIT = 1e9 / 8
# 10 ms of compute for a sample; 10 MB over 1 Gbit/s take 80 ms in a ring of two hosts.
PLAIN = StepModel(0.01, bytes=1e7, rate=GBIT)


def run_of(model: StepModel, ranks: int, hosts: int, samples: float = 8.0, slower: float = 1.0) -> Measured:
    """A run that follows the model exactly, and takes ``slower`` times as long."""
    parts = model.step(ranks, hosts, samples)
    step = sum(parts.values())
    shares = {**dict.fromkeys(PARTS, 0.0), **{name: seconds / step for name, seconds in parts.items()}}
    batch = samples * ranks
    return Measured(ranks, 10.0, batch / step / slower, batch, shares, hosts, model.cores, model.bytes)


@pytest.mark.parametrize(
    ("model", "ranks", "hosts", "compute", "waiting", "moving"),
    [
        (PLAIN, 1, 1, 80.0, 0.0, 0.0),
        (PLAIN, 2, 2, 80.0, 0.0, 80.0),
        (PLAIN, 4, 4, 80.0, 0.0, 120.0),  # 2(h-1)/h
        (PLAIN, 8, 4, 80.0, 0.0, 120.0),  # ranks of a host share its link
        (replace(PLAIN, fixed=0.02), 2, 2, 100.0, 0.0, 80.0),
        (replace(PLAIN, hop=0.005), 4, 4, 80.0, 0.0, 150.0),  # 6 hops
        (replace(PLAIN, overlap=0.5), 4, 4, 80.0, 0.0, 80.0),
        (replace(PLAIN, overlap=1.0), 2, 2, 80.0, 0.0, 0.0),
        (replace(PLAIN, within=0.001), 4, 1, 80.0, 0.0, 4.0),
        (replace(PLAIN, within=0.001), 8, 2, 80.0, 0.0, 84.0),
        (replace(PLAIN, cores=2), 4, 1, 160.0, 0.0, 0.0),  # they take turns
        (replace(PLAIN, cores=2), 4, 2, 80.0, 0.0, 80.0),
        (replace(PLAIN, spread=0.1), 1, 1, 80.0, 0.0, 0.0),
        (replace(PLAIN, spread=0.1), 4, 1, 80.0, 8.4, 0.0),
        (replace(PLAIN, spread=0.1), 512, 512, 80.0, 24.3, 159.7),
    ],
)
def test_a_step(model: StepModel, ranks: int, hosts: int, compute: float, waiting: float, moving: float) -> None:
    parts = model.step(ranks, hosts, 8.0)
    found = [1e3 * parts[name] for name in ("compute", "waiting", "moving")]
    assert found == pytest.approx([compute, waiting, moving], abs=0.1)


def test_the_slowest_of_many() -> None:
    random = Random(0)
    for n in (1, 2, 4, 64):
        drawn = sum(max(random.gauss(0, 1) for _ in range(n)) for _ in range(4000)) / 4000
        assert expected_maximum(n) == pytest.approx(drawn, abs=0.06)


@pytest.mark.parametrize(
    ("local", "cores", "longer"), [(4, 0, 1.0), (1, 2, 1.0), (2, 2, 1.0), (3, 2, 1.5), (8, 2, 4.0)]
)
def test_ranks_take_turns_on_cores(local: int, cores: int, longer: float) -> None:
    assert turns(local, cores) == longer


@pytest.mark.parametrize(
    "model",
    [
        PLAIN,
        replace(PLAIN, hop=0.004),
        replace(PLAIN, spread=0.05),
        replace(PLAIN, bytes=0.0, rate=inf),
        replace(PLAIN, cores=2, spread=0.02),
    ],
)
def test_hosts_that_were_measured_give_the_model_back(model: StepModel) -> None:
    """One to three hosts predict four and sixty-four, with no more known than what the ranks say."""
    runs = [run_of(model, hosts, hosts) for hosts in (1, 2, 3)]
    for ranks in (4, 64):
        expected = run_of(model, ranks, ranks)
        (point,), _ = predict(runs, [ranks])
        assert point.rate == pytest.approx(expected.rate, rel=1e-6)
        assert point.shares == pytest.approx(expected.shares, abs=1e-6)
        low, high = point.interval or (0.0, 0.0)
        assert low <= point.efficiency * (1 + 1e-9)
        assert high >= point.efficiency * (1 - 1e-9)


def test_a_link_that_is_known_tells_hops_from_what_is_hidden() -> None:
    hops, hidden = replace(PLAIN, hop=0.004), replace(PLAIN, overlap=0.3)
    assert fit([run_of(hops, 1, 1), run_of(hops, 2, 2)], GBIT).hop == pytest.approx(0.004)
    found = fit([run_of(hidden, 1, 1), run_of(hidden, 2, 2)], GBIT)
    assert (found.hop, found.overlap) == pytest.approx((0.0, 0.3))


def test_one_host_and_a_link_predict_many_hosts() -> None:
    """Whether communication is hidden is not known then: the interval spans both."""
    model = replace(PLAIN, within=0.001, cores=4)
    runs = [run_of(model, ranks, 1) for ranks in (1, 2, 4)]
    (point,), _ = predict(runs, [64], link=GBIT)
    ideal = runs[0].rate * 64
    assert point.rate == pytest.approx(run_of(model, 64, 16).rate, rel=1e-6)
    low, high = point.interval or (0.0, 0.0)
    assert low == pytest.approx(run_of(model, 64, 16).rate / ideal, rel=1e-6)
    assert high == pytest.approx(run_of(replace(model, overlap=BACKWARD), 64, 16).rate / ideal, rel=1e-6)


def test_more_ranks_than_cores_of_one_host_gain_nothing() -> None:
    model = replace(PLAIN, cores=2)
    (point,), _ = predict([run_of(model, 1, 1), run_of(model, 2, 1)], [4])
    assert (point.speedup, point.efficiency) == pytest.approx((2.0, 0.5))


def test_strong_scaling_has_smaller_batches() -> None:
    """A fixed time of each step is told from two batches, and does not shrink with them."""
    model = replace(PLAIN, fixed=0.02)
    runs = [run_of(model, ranks, ranks, 64.0 / ranks) for ranks in (1, 2, 4)]
    (point,), _ = predict(runs, [8])
    assert point.batch == 64.0
    assert point.rate == pytest.approx(run_of(model, 8, 8, 8.0).rate, rel=1e-6)


def test_the_interval_spans_runs_that_differ() -> None:
    runs = [run_of(PLAIN, n, n, slower=slower) for n in (1, 2, 3) for slower in (0.9, 1.0, 1.1)]
    (point,), _ = predict(runs, [4])
    low, high = point.interval or (0.0, 0.0)
    assert low < point.efficiency < high
    assert isclose(point.rate, run_of(PLAIN, 4, 4).rate, rel_tol=0.02)


def test_a_size_that_was_measured_too_is_held_out_and_compared() -> None:
    runs = [run_of(PLAIN, n, n) for n in (1, 2, 3)] + [run_of(PLAIN, 4, 4, slower=1.1)]
    points, notes = compare(runs, ScalingOptions(predict=[4]))
    assert [(point.ranks, point.interval is None) for point in points[-2:]] == [(4, True), (4, False)]
    assert notes[-1].endswith("off by 10%.")
    few = [replace(run, hosts=1, cores=2) if run.ranks == 4 else run for run in runs]
    assert compare(few, ScalingOptions(predict=[4]))[1][-1].endswith("because the measured ones took turns on 2 cores.")
    assert "Predicted from 1, 2, 3 ranks: 10 ms of compute a sample" in notes[-1]
    assert "10 MB a step over links of 1 Gbit/s" in notes[-1]


@pytest.mark.parametrize(
    ("runs", "sizes", "per_host", "said"),
    [
        (
            [run_of(PLAIN, 2, 1)],
            [8],
            4,
            "no run has crossed a network; give the rate of a host's network",
        ),
        ([run_of(PLAIN, 2, 1)], [2], None, "--predict names every measured size; measure at least one other"),
        ([Measured(2, 1.0, 0.0, 0.0, {})], [4], None, "no samples are known; let each step call ring.log(samples=...)"),
        ([run_of(PLAIN, 1, 1, 8), run_of(PLAIN, 4, 1, 4)], [8], None, "expected the same global batch at all sizes"),
        (
            [run_of(PLAIN, 1, 1, slower=9), run_of(PLAIN, 2, 1), run_of(PLAIN, 3, 1)],
            [4],
            None,
            "the model of a step is off by",
        ),
    ],
)
def test_what_cannot_be_predicted(runs: list[Measured], sizes: list[int], per_host: int | None, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        predict(runs, sizes, per_host=per_host)


def test_what_cannot_be_predicted_hides_nothing_that_was_measured() -> None:
    points, notes = compare([run_of(PLAIN, 1, 1), run_of(PLAIN, 2, 1)], ScalingOptions(predict=[8], gpus_per_host=4))
    assert [point.ranks for point in points] == [1, 2]
    assert all(isinstance(point, Scaling) for point in points)
    assert notes[-1].startswith("Not predicted: 8 ranks are more than the 4 of one host")


@pytest.mark.parametrize(
    ("text", "expected"), [("25Gbit", 3.125e9), ("800 Mbit/s", 1e8), ("1.5gbps", 1.875e8), ("3 GB/s", 3e9)]
)
def test_rates_of_links(text: str, expected: float) -> None:
    assert link_rate(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["25", "25GB", "3gb/s", "0Gbit", "fast", "-1Gbit", ""])
def test_what_is_no_rate_of_a_link(text: str) -> None:
    with pytest.raises(ValueError, match="expected the rate of a host's network such as 25Gbit"):
        link_rate(text)


@pytest.mark.parametrize(
    ("runs", "per_host", "most", "said"),
    [
        # The smallest size was held up: the model, which has no rank do less work than it did, knows no better.
        ([run_of(PLAIN, 1, 1, slower=1.9), run_of(PLAIN, 1, 1)], None, 1.0, ""),
        (
            [run_of(PLAIN, 1, 1, slower=1.6), run_of(PLAIN, 2, 1, slower=1.5)],
            None,
            1.6 / 1.5,
            "4 ranks: more than 100%, as 2 ranks were measured at 107%.",
        ),
        # Four ranks took turns on the two cores that each of them will have.
        (
            [run_of(replace(PLAIN, cores=2), 4, 1), run_of(replace(PLAIN, cores=2), 8, 1)],
            2,
            2.0,
            "more than 100%, because 4 ranks shared cores or a network as 16 on 8 hosts would not.",
        ),
    ],
)
def test_more_than_ideal_is_explained_or_not_predicted(
    runs: list[Measured], per_host: int | None, most: float, said: str
) -> None:
    sizes = [16] if per_host else [4]
    points, note = predict(runs, sizes, link=1e15, per_host=per_host)
    low, high = points[0].interval or (0.0, 0.0)
    assert low <= points[0].efficiency <= high <= most * (1 + 1e-6)
    assert points[0].speedup == pytest.approx(points[0].efficiency * points[0].ranks / runs[0].ranks)
    assert said in note
    assert ("more than 100%" in note) == (high > 1.005)


def test_a_model_that_beats_what_was_measured_is_cut_and_says_so() -> None:
    """One rank alone was held up by 60%, and moved nothing that would show it in its compute."""
    held_up = replace(
        run_of(PLAIN, 1, 1, slower=1.6), shares={**dict.fromkeys(PARTS, 0.0), "compute": 0.5, "moving": 0.5}
    )
    (point,), note = predict([held_up], [4])
    assert point.efficiency == pytest.approx(1.0)
    assert point.rate == pytest.approx(4 * held_up.rate)
    assert "4 ranks: the model gives " in note
    assert "it has 1 rank faster than measured; it is cut to 100%. Measure 1 rank again, with --repeat 3." in note
