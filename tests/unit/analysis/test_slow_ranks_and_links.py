"""Which rank is slow, and why, from what each has measured of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ring_notebook.analysis.slow_ranks_and_links import CAUSES, SlowLink, SlowRanks, cause, explain, find
from ring_notebook.analysis.time_breakdown import OwnTime, Sent, Spent, shares, spent

# Ten seconds of two ranks: the slow one works for nine, the other for four and waits for five.
SLOW = Spent(10.0, 1.0, 0.0, 0.0, 0.0, OwnTime(on_cpu=10.0, samples=100))
USUAL = Spent(10.0, 1.0, 5.0, 0.0, 0.0, OwnTime(on_cpu=5.0, samples=100))


def slow(data: float = 0.0, **own: float) -> Spent:
    return replace(SLOW, fetching=data, own=replace(SLOW.own, **own))


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
        (slow(on_cpu=6.0, queued=3.0, beside=4.0), "threads"),
        (slow(disk=3e9), "disk"),
        (slow(samples=200), "samples"),
        (slow(samples=102), "compute"),
        (slow(on_cpu=6.0, samples=200), "asleep"),
        (slow(on_cpu=8.5, queued=1.2, data=0.9, collecting=0.9), "compute"),
        (slow(on_cpu=7.0, queued=1.3, data=1.3, collecting=1.2), "several"),
        (replace(SLOW, own=OwnTime()), "unknown"),
    ],
)
def test_the_cause_explains_most_of_what_a_rank_takes_longer(rank: Spent, expected: str) -> None:
    assert cause(rank, USUAL) == expected


def test_data_that_another_thread_moves_is_no_sleep() -> None:
    """The main threads of both ranks sleep for five seconds in which their data moves."""
    rank = Spent(10.0, 5.0, 0.0, 0.0, 0.0, OwnTime(on_cpu=5.0))
    assert cause(rank, Spent(10.0, 5.0, 2.5, 0.0, 0.0, OwnTime(on_cpu=2.5))) == "compute"
    assert (rank.asleep, rank.compute) == (0.0, 5.0)


def test_threads_that_compute_for_the_main_one_are_no_sleep() -> None:
    """As those of TensorFlow and XLA, for which the main thread waits."""
    rank, usual = slow(on_cpu=1.0, beside=8.0), replace(USUAL, own=OwnTime(on_cpu=1.0, beside=4.0))
    assert cause(rank, usual) == "compute"
    assert (rank.asleep, usual.asleep) == (0.0, 0.0)


def test_more_computing_waits_more_often_for_a_core() -> None:
    """On a machine whose cores others use all the time, as much as the usual rank for each second on a core."""
    usual = Spent(10.0, 0.0, 6.0, 0.0, 0.0, OwnTime(on_cpu=1.3, queued=2.7))
    rank = Spent(10.0, 0.0, 0.0, 0.0, 0.0, OwnTime(on_cpu=3.25, queued=6.75))
    assert cause(rank, usual) == "compute"
    assert cause(replace(rank, own=OwnTime(on_cpu=1.3, queued=8.7)), usual) == "queued"


def measured(
    seconds: float,
    moving: float,
    waiting: float,
    on_cpu: float,
    queued: float,
    beside: float,
    data: float = 0.0,
    queued_for_data: float = 0.0,
    collecting: float = 0.0,
) -> Spent:
    own = OwnTime(on_cpu, queued, collecting=collecting, queued_for_data=queued_for_data, beside=beside)
    return Spent(seconds, moving, waiting, 0.0, data, own)


@pytest.mark.parametrize(
    ("usual", "rank", "expected"),
    [
        # 50 steps with 10 ms, then 5 ms of sleep; 80 steps with 20 ms; 50 steps with 100 ms.
        ((2.060, 1.032, 0.875, 0.0281, 2.007, 0.0145), (2.092, 0.981, 0.298, 0.0327, 1.623, 0.0164), "asleep"),
        ((1.812, 1.123, 0.620, 0.0220, 1.841, 0.0129), (1.823, 0.993, 0.365, 0.0275, 1.578, 0.0119), "asleep"),
        ((4.965, 1.015, 3.456, 0.2440, 3.693, 0.0320), (4.956, 1.035, 1.045, 0.2473, 3.129, 0.0323), "asleep"),
        ((5.878, 0.601, 4.984, 0.1378, 2.030, 0.0418), (5.869, 0.671, 0.580, 0.1450, 1.736, 0.0416), "asleep"),
        # 20 steps with 20 ms of computing
        ((5.439, 0.283, 4.986, 0.0746, 1.148, 0.0349), (5.448, 0.520, 0.241, 0.5429, 4.900, 0.0373), "compute"),
        # 40 steps with 40 ms of garbage collection
        (
            (7.817, 0.306, 5.067, 0.2979, 2.702, 0.0399, 0.219, 0.216),
            (7.936, 0.243, 0.181, 1.2477, 6.555, 0.0367, 0.090, 0.087, 0.954),
            "garbage",
        ),
        (
            (5.830, 0.149, 2.442, 0.3340, 3.328, 0.0290, 0.063, 0.060),
            (5.887, 0.204, 0.052, 0.7197, 5.098, 0.0290, 0.110, 0.105, 0.391),
            "garbage",
        ),
        # 20 steps beside a thread of its own that computes: it waits for Python's lock, woken again and again.
        (
            (8.904, 0.640, 4.063, 0.1581, 5.420, 0.0406, 0.404),
            (8.835, 0.939, 0.015, 0.1591, 7.626, 0.4289, 1.018),
            "threads",
        ),
        (
            (16.12, 0.464, 12.79, 0.1596, 4.996, 0.0633, 0.197),
            (16.66, 0.620, 0.208, 0.1550, 14.0, 1.184, 2.3),
            "threads",
        ),
        # As the second, had it not slept: what it takes longer is chance of the machine.
        ((1.812, 1.123, 0.620, 0.0220, 1.841, 0.0129), (1.823, 0.993, 0.365, 0.0240, 1.799, 0.0129), "queued"),
    ],
)
def test_a_busy_machine_changes_no_cause(usual: tuple[float, ...], rank: tuple[float, ...], expected: str) -> None:
    """Measured beside eight to forty other processes on one or two cores; a rank without a core does not compute."""
    own, other = measured(*rank), measured(*usual)
    assert cause(own, other) == expected
    of_both = shares([own, other])
    assert of_both["compute"][0] <= own.share(own.own.on_cpu + own.own.beside) + 1e-9
    assert all(sum(parts) == pytest.approx(1.0) for parts in zip(*of_both.values(), strict=True))


def test_a_wait_for_a_core_in_a_loader_is_no_slow_data() -> None:
    """Data in memory, which the main thread collates while other processes use all cores."""
    usual = measured(6.03, 0.61, 1.92, 0.587, 3.9, 0.0, 1.17, 1.02)
    assert cause(measured(6.03, 0.61, 0.62, 0.59, 5.1, 0.0, 2.37, 2.2), usual) == "queued"
    usual = measured(10.0, 1.0, 2.0, 1.0, 6.5, 0.0, 2.0, 1.7)
    own = measured(10.0, 1.0, 0.0, 1.0, 8.0, 0.0, 3.0, 2.7)
    assert cause(own, usual) == "queued"
    said = explain({0: usual, 1: replace(own, waiting=2.0)}, {0: 1.0, 1: 1.0})
    assert said == "The ranks take turns in being late: each waits 20% of the time, for no rank in particular."
    said = explain(dict.fromkeys((0, 1), measured(10.0, 1.0, 0.0, 1.0, 8.0, 0.0, 8.0, 7.5)), {0: 0.0, 1: 0.0})
    assert (
        said == "Moving and reducing data takes 10% of the time: a larger batch per rank, fewer synchronisations or "
        "compression would help."
    )
    # Of a loader that sleeps for a disk or its workers, or works for longer, it is the data.
    assert cause(measured(10.0, 1.0, 0.0, 1.0, 6.5, 0.0, 4.5, 1.7), usual) == "data"
    assert cause(measured(10.0, 1.0, 0.0, 1.3, 8.4, 0.0, 4.0, 3.4), usual) == "data"
    quiet = measured(10.0, 1.0, 5.0, 4.0, 0.2, 0.0, 0.5)
    assert cause(measured(10.0, 1.0, 0.0, 9.0, 0.5, 0.0, 4.5), quiet) == "data"
    assert cause(measured(10.0, 1.0, 0.0, 4.0, 0.2, 0.0, 5.5), quiet) == "data"


def test_a_busy_machine_hides_no_files() -> None:
    """Measured beside eight other processes on two cores: 64 steps that write and sync a gigabyte in all."""
    usual = Spent(6.332, 0.324, 2.337, 0.0, 0.244, OwnTime(on_cpu=1.772, queued=2.294, beside=0.047, samples=20587))
    own = OwnTime(on_cpu=2.038, queued=3.421, beside=0.045, disk=1.064e9, samples=20573)
    assert cause(Spent(6.330, 0.400, 0.197, 0.0, 0.176, own), usual) == "disk"
    usual = Spent(6.722, 0.568, 1.608, 0.0, 0.326, OwnTime(on_cpu=1.363, queued=3.745, beside=0.049, samples=15501))
    own = OwnTime(on_cpu=1.435, queued=4.502, beside=0.050, disk=3.49e8, samples=15443)
    assert cause(Spent(6.692, 0.597, 0.442, 0.0, 0.200, own), usual) == "disk"
    assert cause(Spent(6.692, 0.597, 0.442, 0.0, 0.200, replace(own, disk=0.0)), usual) == "queued"


def test_sleep_is_a_part_of_the_time_of_its_own() -> None:
    ranks = [slow(on_cpu=3.0), USUAL]
    assert (ranks[0].compute, ranks[0].asleep) == (3.0, 6.0)
    assert shares(ranks) == {"compute": [0.3, 0.4], "asleep": [0.6, 0.0], "moving": [0.1, 0.1], "waiting": [0.0, 0.5]}
    assert shares([slow(on_cpu=8.6), USUAL])["compute"] == [0.9, 0.4], "so little is shown as compute"


def test_the_usual_rank_has_its_share_of_everything() -> None:
    """What both ranks have explains nothing."""
    own = OwnTime(on_cpu=3.0, queued=2.0, throttled=2.0, collecting=1.0, faults=1000, disk=1e9)
    usual = replace(USUAL, own=own)
    assert cause(replace(SLOW, own=replace(own, on_cpu=8.0)), usual) == "compute"


def test_each_cause_is_a_sentence_with_something_to_do() -> None:
    found = find({0: USUAL, 1: SLOW, 2: USUAL}, 100)
    assert isinstance(found, SlowRanks)
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


def test_a_rank_whose_newest_report_is_older_than_that_of_another_is_not_slow() -> None:
    """Two equal ranks: one has told what it did in 50 steps, the other one what it did in 62."""
    rank = Spent(5.0, 1.0, 1.5, 0.0, 0.3, OwnTime(on_cpu=1.4, queued=1.0, beside=0.1, samples=50 * 16))
    later = rank.over(6.2)
    assert later.own.samples == pytest.approx(62 * 16)
    assert find({0: rank, 1: later}, 60) is None
    assert find({0: later, 1: rank}, 60) is None


def test_the_age_of_a_report_changes_neither_factor_nor_cause() -> None:
    links = (Sent(2, 1.0, 1e6),)
    for seconds in (8.0, 10.0, 14.0):
        for ranks in ({0: USUAL, 1: replace(SLOW, links=links).over(seconds)}, {0: USUAL.over(seconds), 1: SLOW}):
            found = find(ranks, 100)
            assert isinstance(found, SlowRanks)
            assert (found.ranks, found.cause) == ((1,), "compute")
            assert (found.factor, found.waits) == pytest.approx((2.25, 0.5))
    assert Spent(0.0, 0.0, 0.0, 0.0, 0.0).over(3.0) == Spent(0.0, 0.0, 0.0, 0.0, 0.0)


def test_a_recording_says_the_same_however_short_it_is() -> None:
    ranks = {0: replace(USUAL, seconds=3.0, waiting=1.5), 1: replace(SLOW, seconds=3.0)}
    found = find(ranks)
    assert found is not None
    assert explain(ranks, {0: 0.0, 1: 1.5}) == f"R{found.sentence[1:]}."


def test_a_rank_reports_numbers_only() -> None:
    account = spent({"training": 9.0, "queued": 2.0, "on_cpu": "many", "samples": 5}, 1.0)
    assert account.own == OwnTime(queued=2.0, samples=5.0)


def moving(**links: tuple[float, float]) -> Spent:
    """Ten seconds of a rank, of which it moves data for six; seconds and bytes by rank that it sends to."""
    return Spent(10.0, 6.0, 0.0, 0.0, 0.0, links=tuple(Sent(int(to[1:]), *sent) for to, sent in links.items()))


def test_the_slow_link_between_hosts_is_named() -> None:
    """By the rate while data is on its way. What agrees on operations is too little to say anything."""
    ranks = {0: moving(_1=(4.7, 8e7), _2=(0.7, 14e3)), 1: moving(_2=(8.4, 8e7)), 2: moving(_0=(0.9, 8e7))}
    found = find(ranks, 20)
    assert isinstance(found, SlowLink)
    assert (found.source, found.to) == (1, 2)
    assert found.sentence.startswith(
        "the link from the host of rank 1 to that of rank 2 carries 76.2 Mbit/s, the others at least 5.6x that; the "
        "ranks move data 60% of the time. See what else uses it"
    )
    assert find(ranks, 5) is None
    assert find({0: ranks[0]}, 20) is None


def test_a_rank_whose_own_work_is_next_to_nothing_hides_no_slow_link() -> None:
    """Rank 1 has written all to its socket, and waits for rank 0, which still receives."""
    receives = Spent(10.0, 9.85, 0.1, 0.0, 0.0, links=(Sent(1, 3.9, 1.2e8),))
    sends = Spent(10.0, 5.05, 4.91, 0.0, 0.0, links=(Sent(0, 9.85, 1.2e8),))
    assert isinstance(find({0: receives, 1: sends}), SlowLink)


@pytest.mark.parametrize(
    "ranks",
    [
        {0: moving(_1=(7.2, 3e8)), 1: moving(_0=(6.0, 3e8))},  # alike
        {0: moving(_1=(7.2, 1e6)), 1: moving(_0=(0.1, 1e6))},  # hardly anything
        {0: moving(_1=(0.5, 1e8)), 1: moving(_0=(0.1, 1e8))},  # seldom used
        {rank: moving() for rank in range(2)},  # one host
        {0: replace(moving(_1=(8.0, 8e7)), moving=0.5), 1: replace(moving(_0=(0.9, 8e7)), moving=0.5)},  # overlapped
    ],
)
def test_a_link_that_costs_nothing_or_does_not_stand_out(ranks: dict[int, Spent]) -> None:
    assert find(ranks, 20) is None


def test_what_went_to_other_hosts_is_among_the_facts() -> None:
    facts = {"training": 10.0, "communication": 6.0, "sending to 12": 4.5, "sent to 12": 9e6}
    assert spent(facts, 20.0).links == (Sent(12, 4.5, 9e6),)
