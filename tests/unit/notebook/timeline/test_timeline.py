"""The timeline of a recorded run: read, summed up, explained, drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ring_notebook.notebook.record.run_files import RunFiles
from ring_notebook.notebook.run.timeline import HELD, MOST_BARS, OWN_WORK, Span, Timeline, account, vega_lite
from ring_notebook.protocol.records import COUNTED, PROGRAM, TRAINING


def event(rank: int, begin: float, seconds: float, phase: str, last: int = -1, sequence: int = 1) -> dict[str, Any]:
    """An event as ranks write them: microseconds on the wall clock."""
    arguments = {"sequence": sequence, "bytes": 4 << 20, **({"last to arrive": last} if last >= 0 else {})}
    return {
        "name": "allreduce bucket 0",
        "cat": phase,
        "ph": "X",
        "ts": 1.7e15 + begin * 1e6,
        "dur": seconds * 1e6,
        "pid": rank,
        "tid": PROGRAM,
        "args": arguments,
    }


def trained(begin: float, end: float, ranks: int = 2) -> list[dict[str, Any]]:
    """From when to when each rank trained."""
    return [
        {**event(rank, moment, 0, TRAINING), "ph": "i", "s": "t"} for rank in range(ranks) for moment in (begin, end)
    ]


def counted(rank: int, moment: float, **own: float) -> dict[str, Any]:
    """What a rank has counted of itself until a moment; its process has lived for an hour before."""
    return {**event(rank, moment, 0, COUNTED), "ph": "C", "args": {"on_cpu": 3600.0, "disk": 1e9, **own}}


def timeline(directory: Path, *events: dict[str, Any]) -> Timeline:
    """What the kernel writes of them, read again."""
    files = RunFiles(directory, 2)
    for rank in sorted({one["pid"] for one in events}):
        own = [one for one in events if one["pid"] == rank]
        files.add_trace(json.dumps(own).encode())
    files.close()
    return Timeline.of_run(directory)


def steps(size: int, waits: dict[int, float], last: int, moving: float = 0.01) -> list[dict[str, Any]]:
    """Three steps of a second each, at whose end ``waits`` says how long a rank waits for rank ``last``."""
    return [
        *trained(0, 3, size),
        *(
            one
            for step in range(3)
            for rank in range(size)
            for one in (
                event(rank, step + 1 - waits.get(rank, 0.0) - moving, waits.get(rank, 0.0) + moving, "held"),
                event(rank, step + 1 - waits.get(rank, 0.0) - moving, waits.get(rank, 0.0), "held up", last, step),
                {**event(rank, step + 1 - moving, moving, "moving", sequence=step), "tid": 0},
            )
        ),
    ]


def test_a_rank_that_is_slow_is_named_with_what_it_costs(tmp_path: Path) -> None:
    slow = timeline(tmp_path, event(0, 0, 0, "data"), *steps(3, {0: 0.4, 1: 0.3}, last=2))
    assert slow.seconds == pytest.approx(3.0)
    accounts = slow.accounts
    assert [one.spent.waiting for one in accounts] == pytest.approx([1.2, 0.9, 0.0])
    assert [one.spent.moving for one in accounts] == pytest.approx([0.03] * 3)
    assert [one.spent.compute for one in accounts] == pytest.approx([1.77, 2.07, 2.97])
    assert [one.waited_for for one in accounts] == pytest.approx([0.0, 0.0, 1.05])  # the usual one of those that wait
    assert slow.why.startswith("Rank 2 is 1.4x slower outside of collectives; the others wait 35%. ")


def test_a_rank_that_waits_for_its_data_is_told_from_a_slow_one(tmp_path: Path) -> None:
    late = timeline(tmp_path, *steps(2, {0: 0.5}, last=1), *(event(1, step, 0.5, "data") for step in range(3)))
    assert late.why.startswith("Rank 1 is 2.0x slower in getting data; the others wait 50%. ")


def test_ranks_that_take_turns_are_not_blamed(tmp_path: Path) -> None:
    turns = [
        *trained(0, 2),
        event(0, 0, 0, "moving"),
        *(event(0, 0.5, 0.5, phase, 1, 1) for phase in HELD),
        *(event(1, 1.5, 0.5, phase, 0, 2) for phase in HELD),
    ]
    assert timeline(tmp_path, *turns).why.startswith("The ranks take turns in being late: each waits 25% of the time")


def test_data_that_takes_longer_than_the_turns_is_named(tmp_path: Path) -> None:
    turns = [event(rank, 0.8 + rank, 0.2, phase, 1 - rank, rank + 1) for rank in range(2) for phase in HELD]
    slow_data = [event(rank, step, 0.6, "data") for rank in range(2) for step in range(2)]
    assert timeline(tmp_path, *trained(0, 2), *turns, *slow_data).why.startswith("Every rank waits for data 60% of")


def test_the_cause_is_what_the_ranks_have_counted_in_its_seconds(tmp_path: Path) -> None:
    """Rank 2 sleeps in the first two seconds, and computes in the third."""
    own = [
        *(counted(rank, moment, on_cpu=3600 + 0.5 * moment) for rank in range(2) for moment in (0, 1, 2, 3)),
        *(counted(2, moment, on_cpu=3600 + worked) for moment, worked in ((0, 0), (1, 0.2), (2, 0.4), (3, 1.4))),
    ]
    recorded = timeline(tmp_path, *steps(3, {0: 0.4, 1: 0.3}, last=2), *own)
    begins, asleep, computes = "Rank 2 is 1.4x slower in ", "sleeping or waiting outside of collectives;", "compute;"
    assert recorded.why.startswith(f"{begins}{asleep}")
    assert recorded.between(0, 2).why.startswith(f"{begins}{asleep}")
    assert recorded.between(2, 3).why.startswith(f"{begins}{computes}")
    assert recorded.between(1.9, 2.2).why.split(";")[0].endswith("outside of collectives"), "nothing is known of that"
    assert recorded.table.columns == ["rank", "compute", "asleep", "moving", "waiting", "others waited for it"]
    assert recorded.table.rows[2][1:3] == ["46.7%", "52.3%"]
    assert vega_lite(recorded.spans)["data"]["values"][0]["phase"] == OWN_WORK


def test_communication_that_takes_long_is_named(tmp_path: Path) -> None:
    heavy = timeline(tmp_path, event(0, 0, 0, "data"), *steps(2, {}, last=-1, moving=0.5))
    assert heavy.why.startswith(
        "Moving and reducing data takes 50% of the time, 100% of it in allreduce bucket 0 (4.0 MiB each)"
    )


def test_the_bubble_of_a_pipeline(tmp_path: Path) -> None:
    stages = timeline(
        tmp_path,
        *trained(0, 3),
        event(0, 0, 0, "moving"),
        *(event(rank, step + 0.5, 0.2 + 0.1 * rank, "bubble") for rank in range(2) for step in range(3)),
        event(0, 3, 0, "moving"),
    )
    assert [one.spent.compute for one in stages.accounts] == pytest.approx([2.4, 2.1])
    assert stages.why.startswith("The stages wait for messages of one another 25% of the time, rank 1 longest (30%)")
    assert "bubble" in stages.table.columns


def test_waits_of_backends_that_do_not_say_for_whom(tmp_path: Path) -> None:
    waits = [*trained(0, 2), event(0, 0, 0.3, "waiting"), event(1, 0.9, 0.1, "waiting"), event(1, 2, 0, "moving")]
    assert timeline(tmp_path, *waits).why == "The ranks wait for one another 10% of the time, rank 1 least."


def test_data_that_is_late_everywhere(tmp_path: Path) -> None:
    starved = timeline(tmp_path, *steps(1, {}, last=-1), *(event(0, step, 0.6, "data") for step in range(3)))
    assert starved.why.startswith("Every rank waits for data 60% of the time")


def test_nothing_to_blame(tmp_path: Path) -> None:
    fine = timeline(tmp_path, event(0, 0, 0, "data"), *steps(2, {}, last=-1))
    assert fine.why == "The ranks keep step: 99% of the time is spent outside of collectives."
    sleepers = [counted(rank, moment, on_cpu=3600 + 0.5 * moment) for rank in range(2) for moment in (0, 3)]
    fine = timeline(tmp_path / "slept", event(0, 0, 0, "data"), *steps(2, {}, last=-1), *sleepers)
    assert fine.why == (
        "The ranks keep step: 50% of the time is compute, and 49% sleep or waiting outside of collectives."
    )
    assert Timeline([]).why.startswith("No collective was called")


def test_threads_that_wait_at_the_same_time_count_once() -> None:
    spans = [Span(0, 0.0, 1.0, "held", "a", PROGRAM, 1, 0, -1), Span(0, 0.5, 1.5, "held", "b", PROGRAM, 1, 0, -1)]
    (own,) = account(spans, {0: (0.0, 2.0)})
    assert (own.spent.compute, own.spent.moving) == pytest.approx((0.5, 1.5))


def test_what_goes_on_beside_the_program_takes_none_of_its_time() -> None:
    spans = [Span(0, 0.0, 1.0, "moving", "a", 0, 1, 0, -1), Span(0, 0.9, 1.0, "held", "a", PROGRAM, 1, 0, -1)]
    (own,) = account(spans, {0: (0.0, 2.0)})
    assert (own.spent.compute, own.spent.moving) == pytest.approx((1.9, 0.1))


def test_set_up_counts_in_no_share(tmp_path: Path) -> None:
    whole = timeline(
        tmp_path,
        event(0, 0, 4, "held"),
        event(0, 5, 1, "held"),
        event(1, 5, 1, "data"),
        *trained(4, 8),
    )
    assert whole.table.columns == ["rank", "compute", "loading", "moving", "others waited for it"]
    assert [row[1:4] for row in whole.table.rows] == [["75.0%", "0.0%", "25.0%"], ["75.0%", "25.0%", "0.0%"]]


def test_a_part_of_it(tmp_path: Path) -> None:
    part = timeline(tmp_path, event(0, 0, 0, "data"), *steps(2, {0: 0.4}, last=1)).between(1.5, 1.8)
    assert (part.begin, part.seconds) == pytest.approx((1.5, 0.3))
    assert part.accounts[0].spent.waiting == pytest.approx(0.21)
    assert part.accounts[0].spent.seconds == pytest.approx(0.3)


def test_a_run_that_was_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--timeline"):
        Timeline.of_run(tmp_path)


def test_the_chart_holds_every_span_and_stays_small_when_there_are_many() -> None:
    few = [Span(rank, 0.1 * rank, 1.0, "waiting", "allreduce", 0, 1, 64, 1) for rank in range(2)]
    bars = vega_lite(few)["data"]["values"]
    assert [(bar["rank"], bar["phase"], bar["begin"], bar["end"]) for bar in bars] == [
        (0, OWN_WORK, 0.0, 1.0),
        (1, OWN_WORK, 0.0, 1.0),
        (0, "waiting", 0.0, 1.0),
        (1, "waiting", 0.1, 1.0),
    ]
    assert bars[2]["for"] == 1
    assert vega_lite(few)["config"]["legend"]["orient"] == "top", "at the right a narrow page cuts it off"

    # All seconds of the table and all ranks, also those that have waited for nothing, in the words of the table.
    chart = vega_lite(
        [Span(1, 0.1, 0.2, "data", "batch", PROGRAM, 1, 0, -1)], {0: (0.0, 0.4), 1: (0.0, 0.8)}, "compute"
    )
    assert [(bar["rank"], bar["phase"], bar["begin"], bar["end"]) for bar in chart["data"]["values"]] == [
        (0, "compute", 0.0, 0.4),
        (1, "compute", 0.0, 0.8),
        (1, "loading", 0.1, 0.2),
    ]
    assert chart["encoding"]["color"]["scale"]["domain"] == ["compute", "loading"]

    many = [Span(0, i * 1e-3, i * 1e-3 + 5e-4, "moving", "allreduce", 0, i, 64, -1) for i in range(50_000)]
    bars = vega_lite(many)["data"]["values"]
    assert len(bars) <= MOST_BARS + 1
    assert bars[-1]["end"] == pytest.approx(many[-1].end, abs=1e-6)
    assert len(json.dumps(vega_lite(many))) < 500_000


def test_sentence_table_and_chart_are_of_the_same_seconds(tmp_path: Path) -> None:
    """Those of the training: the first rank begins at 4, and the last one ends at 8.5."""
    other = [{**one, "ts": one["ts"] + 0.5e6, "pid": 1} for one in trained(4, 8, 1)]
    spans = [event(0, 0, 2, "moving"), event(0, 3, 2, "moving"), event(1, 8, 2, "moving")]
    whole = timeline(tmp_path, *trained(4, 8, 1), *other, *({**one, "tid": 0} for one in spans))
    for part, begin, end in ((whole, 4.0, 8.5), (whole.between(5, 6), 5.0, 6.0)):
        assert (part.begin, part.seconds) == pytest.approx((begin, end - begin))
        bars = vega_lite(part.spans, part._training)["data"]["values"]
        assert (min(bar["begin"] for bar in bars), max(bar["end"] for bar in bars)) == pytest.approx((begin, end))
        assert f"{end - begin:.3g} s;" in repr(part.table)


def test_what_ranks_say_of_the_whole_run_stands_below_the_table(tmp_path: Path) -> None:
    label = {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU tensors by NCCL"}}
    whole = timeline(tmp_path, label, event(0, 0, 1, "moving"), event(1, 0, 1, "moving"), *trained(0, 1))
    assert "1 s; GPU tensors by NCCL; the whole trace" in repr(whole)
    assert whole.between(0, 0.5).labels == ["GPU tensors by NCCL"]
