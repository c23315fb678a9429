"""Runs of several sizes are compared, and the report names the cause of lost efficiency."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ring_notebook.analysis.scaling import (
    PARTS,
    Kind,
    Measured,
    Scaling,
    cause,
    kind_of,
    lost,
    measure,
    measured,
    table,
    write_csv,
)
from ring_notebook.analysis.time_breakdown import RankTimes

ALL_COMPUTE = {**dict.fromkeys(PARTS, 0.0), "compute": 1.0}


def shares(**parts: float) -> dict[str, float]:
    return {**ALL_COMPUTE, "compute": 1 - sum(parts.values()), **parts}


def one(
    ranks: int, rate: float, batch: float = 64.0, parts: Mapping[str, float] = ALL_COMPUTE, seconds: float = 1.0
) -> Measured:
    return Measured(ranks, seconds, rate, batch, parts)


def test_a_run_is_measured_from_what_its_ranks_say() -> None:
    spent = {"training": 10.0, "communication": 4.0, "waiting": 3.0, "data_wait": 1.0, "posted": 4000.0}
    run = measured([RankTimes(rank, 2, 8, 4, 2.0 + rank, 60.0, spent) for rank in range(2)])
    assert (run.ranks, run.seconds, run.rate, run.batch, run.step) == (2, 3.0, 50.0, 30.0, 0.6)
    assert (run.hosts, run.cores, run.posted) == (2, 8, 1000.0)
    assert run.shares == pytest.approx({**ALL_COMPUTE, "compute": 0.5, "data": 0.1, "moving": 0.1, "waiting": 0.3})


def test_repeated_runs_give_their_median_and_spread() -> None:
    points = measure([one(2, 150.0), one(1, 100.0), one(1, 90.0), one(2, 180.0), one(1, 110.0), one(2, 160.0)])
    assert [(point.ranks, point.rate, point.speedup, point.efficiency) for point in points] == [
        (1, 100.0, 1.0, 1.0),
        (2, 160.0, 1.6, 0.8),
    ]
    assert [point.spread for point in points] == pytest.approx([0.2, 30 / 160])


def test_without_samples_the_time_counts() -> None:
    points = measure([one(1, 0.0, 0.0, seconds=8.0), one(4, 0.0, 0.0, seconds=2.5)])
    assert points[1].speedup == pytest.approx(3.2)
    assert "samples/s" not in table(points)[0]


def test_what_is_lost_adds_up() -> None:
    points = measure([one(1, 100.0), one(4, 200.0, parts=shares(moving=0.2, waiting=0.25))])
    parts = lost(points[0], points[1])
    assert parts == pytest.approx({**ALL_COMPUTE, "compute": 0.05, "moving": 0.2, "waiting": 0.25})
    assert sum(parts.values()) == pytest.approx(1 - points[1].efficiency)


@pytest.mark.parametrize(
    ("last", "cores", "said"),
    [
        (one(4, 380.0), 8, "4 ranks reach 95% of ideal scaling."),
        (
            one(4, 100.0, parts=shares(waiting=0.7)),
            2,
            "4 ranks reach 25% of ideal scaling: they take turns on 2 cores, so more ranks than cores gain nothing.",
        ),
        (one(4, 200.0, parts=shares(waiting=0.5)), 8, "50% is lost, most of it (50%) in waiting for the slowest rank."),
        (one(4, 200.0, parts=shares(moving=0.4)), 8, "50% is lost, most of it (40%) in moving data between ranks"),
        (one(4, 200.0, parts=shares(data=0.5)), 0, "50% is lost, most of it (50%) in waiting for data"),
        (one(4, 200.0), 8, "50% is lost, most of it (50%) in compute, which takes longer for each sample"),
        (
            one(4, 564.0),
            8,
            "4 ranks reach 141% of ideal scaling, more than ideal. Usual causes: 1 rank alone was held up by other "
            "programs or smaller batches, which fit caches better. Measure again with --repeat 3.",
        ),
        (one(4, 564.0, 256.0), 8, "was held up by other programs. Measure again"),
    ],
)
def test_the_cause_of_what_is_lost(last: Measured, cores: int, said: str) -> None:
    assert said in cause(measure([one(1, 100.0), last]), cores)


def test_one_rank_without_a_core_is_no_measure() -> None:
    """84% on a machine that others used: there the ranks that shared two cores were not slow because of that."""
    first = one(1, 100.0, parts=shares(off_core=0.84))
    said = "1 rank alone slept or waited for a core 84% of the time: if other programs use the cores, measure again"
    assert said in cause(measure([first, one(4, 100.0, parts=shares(waiting=0.7))]), 2)
    assert "measure again" in cause(measure([first, one(2, 200.0)]), 2)


@pytest.mark.parametrize(
    ("batches", "wanted", "said"),
    [
        ((64, 64), "", "Strong scaling: the global batch is 64 on any number of ranks."),
        ((64, 256), "", "Weak scaling: 64 samples a rank."),
        ((64, 100), "", "The global batch: it is 64 on 1 rank and 100 on 4."),
        ((64, 256), "weak", "Weak scaling: 64 samples a rank."),
        ((64, 256), "strong", "Not strong scaling: the global batch should stay the same; it is 64 on 1 rank and 256"),
        ((64, 64), "weak", "Not weak scaling: the global batch should grow with the ranks; it is 64 on 1 rank and 64"),
        ((0, 0), "strong", ""),
    ],
)
def test_which_scaling_was_measured(batches: tuple[int, int], wanted: Kind, said: str) -> None:
    points = measure([one(1, 100.0, batches[0]), one(4, 300.0, batches[1])])
    assert kind_of(points, wanted).startswith(said)


def test_the_numbers_as_a_file_and_as_a_table(tmp_path: Path) -> None:
    point = Scaling(2, 1.5, 100.0, 64.0, 0.1, 1.8, 0.9, shares(moving=0.25), joules=0.25)
    predicted = Scaling(8, 2.0, 3000.0, 256.0, 0.0, 6.0, 0.75, shares(moving=0.5), (0.5, 0.8))
    write_csv([point, predicted], tmp_path / "scale.csv")
    assert (tmp_path / "scale.csv").read_text().splitlines() == [
        "ranks,seconds,samples_per_s,batch,spread,speedup,efficiency,compute,asleep,off_core,data,moving,waiting,bubble,low,high,"
        "joules_per_sample",
        "2,1.5,100,64,0.1,1.8,0.9,0.75,0,0,0,0.25,0,0,,,0.25",
        "8,2,3000,256,0,6,0.75,0.5,0,0,0,0.5,0,0,0.5,0.8,",
    ]
    columns, rows = table([point, predicted])
    assert columns[:7] == ["ranks", "seconds", "global batch", "samples/s", "spread", "speedup", "efficiency"]
    assert rows[0][:7] == ["2", "1.50", "64", "100", "10%", "1.80", "90%"]
    assert rows[1][:7] == ["8 predicted", "2.00", "256", "3,000", "", "6.00", "75% (50% to 80%)"]
    assert (columns[-1], rows[0][-1], rows[1][-1]) == ("J/sample", "0.25", "")
    assert "J/sample" not in table([predicted])[0]
