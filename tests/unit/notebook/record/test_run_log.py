"""The log of a run, fed with real records: nothing lost on disk, bounded in memory, readable again."""

from __future__ import annotations

import math
import time
from array import array
from pathlib import Path
from threading import Thread
from typing import Any

import pandas
import pytest

from harness.waiting import until
from ring_notebook.notebook.record.logged_rows import MetricRow
from ring_notebook.notebook.record.run_files import Journal, read_json, read_text, write_json
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.record.run_view import OUTPUT_CHARACTERS
from ring_notebook.notebook.run.takeover import FollowedLog, TakenOverLog
from ring_notebook.protocol.records import (
    Cleared,
    Display,
    Ended,
    Failure,
    Load,
    MetricBatch,
    Output,
    Params,
    Record,
    Status,
    encode,
    stamped,
)


def batch(rank: int, steps: range, /, **metrics: list[float]) -> MetricBatch:
    rows = zip(steps, *metrics.values(), strict=True)
    values = array("d", (value for row in rows for value in (1000.0 + row[0] / 10, *row)))
    return MetricBatch("r1", rank, tuple(metrics), values)


def ended(rank: int, status: Any = "ok") -> Ended:
    return Ended("r1", rank, status, 1.0)


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    return RunLog(tmp_path / "r1", "r1", "first", 2, "train()\n", {"plot": ["loss"]}, {"torch": "2"})


def feed(log: RunLog, *records: Record) -> None:
    log.put(encode(records))


def test_every_row_is_on_disk_from_every_thread(log: RunLog) -> None:
    def rank(number: int) -> None:
        for start in range(0, 5000, 50):
            steps = range(start, start + 50)
            feed(log, batch(number, steps, loss=[step / 3 for step in steps], samples=[32.0] * 50))

    threads = [Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.finish("ok")
    for number in range(2):
        mine = [row for row in log.metrics() if row.rank == number]
        assert [row.step for row in mine] == list(range(5000))
        assert [row.values["loss"] for row in mine] == [step / 3 for step in range(5000)]
    assert log.summary["samples"] == 2 * 5000 * 32


def test_metrics_are_a_sequence_of_rows(log: RunLog) -> None:
    assert repr(log.metrics()) == "<Metrics: no rows>"
    feed(log, batch(0, range(3), loss=[3, 2, 1]), batch(1, range(2), accuracy=[0.5, 0.75]))
    log.finish("ok")
    metrics = log.metrics()
    assert metrics[1] == MetricRow(0, 1000.1, 1, {"loss": 2.0})
    assert metrics[-1] == MetricRow(1, 1000.1, 1, {"accuracy": 0.75})
    assert metrics[2:4] == [metrics[2], metrics[3]] == list(metrics)[2:4]
    assert [len(metrics), len(list(metrics))] == [5, 5]
    with pytest.raises(IndexError, match="row 5 of 5"):
        metrics[5]
    assert metrics.names == ("loss", "accuracy")
    assert repr(metrics) == "<Metrics: 5 rows of ranks 0-1: loss, accuracy>"


def test_a_metric_may_be_called_as_a_field_of_the_record(log: RunLog) -> None:
    names = {"rank": [7.0], "time": [8.0], "step": [9.0], "rows": [10.0], "names": [11.0], "kind": [12.0]}
    feed(log, batch(1, range(1), **names), ended(0), ended(1))
    log.finish("ok")
    for record in (log, RunRecord.load(log.directory)):
        (row,) = record.metrics()
        assert row == MetricRow(1, 1000.0, 0, {name: value for name, (value,) in names.items()})
        assert record.view().ranks[1].last == row.values
        assert record.view().ranks[1].step == 0
        frame = record.metrics().to_pandas()
        assert frame.iloc[0].to_dict() == {
            "rank": 1,
            "time": pandas.Timestamp(1000, unit="s", tz="UTC"),
            "step": 0,
            "rows": 10,
            "names": 11,
            "kind": 12,
            "metric.rank": 7,
            "metric.time": 8,
            "metric.step": 9,
        }


def test_metrics_are_a_data_frame(log: RunLog) -> None:
    feed(log, batch(0, range(3), loss=[3, 2, 1]), batch(1, range(2), accuracy=[0.5, 0.75]))
    log.finish("ok")
    frame = log.metrics().to_pandas()
    assert list(frame.columns) == ["rank", "time", "step", "loss", "accuracy"]
    assert frame[frame["rank"] == 0]["loss"].tolist() == [3, 2, 1]
    assert frame[frame["rank"] == 1]["loss"].isna().all()


def test_rows_that_json_cannot_say_survive(log: RunLog) -> None:
    feed(log, batch(0, range(3), loss=[math.nan, math.inf, 1.0]))
    log.finish("ok")
    losses = [row.values["loss"] for row in log.metrics()]
    assert math.isnan(losses[0])
    assert losses[1:] == [math.inf, 1.0]


def test_view_shows_each_rank(log: RunLog) -> None:
    steps = range(21)
    feed(log, batch(0, steps, loss=[1.0] * 21, samples=[8.0] * 21), batch(1, range(3), loss=[2.0] * 3))
    feed(log, Status("r1", 0, 1.0, line=4, progress=(20, 40)), Status("r1", 1, 1.0, progress=(2, 40)))
    feed(log, ended(0), ended(1))
    assert log.wait_ended([0, 1], 45)
    view = log.view()
    assert view.names == ("loss", "samples")
    assert view.charted == ("loss",)
    assert list(view.curves["loss"][1].x) == [0, 1, 2]
    assert view.ranks[0].samples_per_s == pytest.approx(80)  # 8 samples each tenth of a second
    assert view.samples_per_s == pytest.approx(80)
    assert view.progress == pytest.approx(2 / 40)
    assert [rank.step for rank in view.ranks] == [20, 2]
    assert view.ranks[1].last == {"loss": 2.0}
    log.finish("ok")


def test_a_view_does_not_change_later(log: RunLog) -> None:
    feed(log, batch(0, range(2), loss=[1, 2]), ended(0))
    log.wait_ended([0], 45)
    view = log.view()
    feed(log, batch(1, range(2), loss=[1, 2]), ended(1))
    log.wait_ended([1], 45)
    assert list(view.curves["loss"]) == [0]
    log.finish("ok")


def test_the_end_of_a_line_too_long_for_memory_is_kept(log: RunLog) -> None:
    feed(log, Output("r1", 1, "stdout", "x" * OUTPUT_CHARACTERS), Output("r1", 1, "stdout", "y\n"))
    log.finish("ok")
    assert "".join(piece.text for piece in log.view().output) == "x" * (OUTPUT_CHARACTERS - 2) + "y\n"


def test_wait_ended_says_no_after_its_time(log: RunLog) -> None:
    feed(log, ended(0))
    assert log.wait_ended([0], 45)
    assert not log.wait_ended([0, 1], 0.1)
    log.finish("failed")


def test_output_in_memory_is_bounded_and_whole_on_disk(log: RunLog) -> None:
    line = "x" * 999 + "\n"
    for _ in range(300):
        feed(log, Output("r1", 1, "stdout", line))
    log.finish("ok")
    kept = log.view().output
    assert sum(len(piece.text) for piece in kept) <= OUTPUT_CHARACTERS
    assert kept[-1].number == 300
    assert (log.directory / "journal.jsonl").read_text().count("x" * 999) == 300


def test_a_finished_run_reads_back_the_same(log: RunLog) -> None:
    failure = Failure("r1", 1, "ValueError", "builtins", "bad", (("<cell>", 3, "f", "raise"),), "Traceback")
    feed(log, batch(0, range(50), loss=[1 / (step + 1) for step in range(50)], samples=[4.0] * 50))
    feed(log, Output("r1", 1, "stderr", "careful\n"), failure, ended(0, "aborted"), ended(1, "failed"))
    summary = log.finish("failed")
    again = RunRecord.load(log.directory)
    assert again.summary == summary
    assert (again.status, again.source, again.options) == ("failed", "train()\n", {"plot": ["loss"]})
    assert again.failures() == [failure]
    assert {rank: one.status for rank, one in again.ended().items()} == {0: "aborted", 1: "failed"}
    before, after = log.view(), again.view()
    assert after.curves == before.curves
    assert after.throughput == before.throughput
    assert after.output == before.output


def test_displays_and_what_was_taken_back_read_back_the_same(log: RunLog) -> None:
    figure = {"image/png": "iVBO", "text/plain": "<Figure>"}
    feed(log, Output("r1", 0, "stdout", "gone\n"), Display("r1", 0, {"text/html": "gone"}))
    feed(log, Output("r1", 1, "stdout", "stays\n"), Cleared("r1", 0))
    feed(log, Display("r1", 0, figure, {"a": 1}), Display("r1", 1, figure, {"a": 1}), ended(0), ended(1))
    log.finish("ok")
    for record in (log, RunRecord.load(log.directory)):
        view = record.view()
        assert [piece.text for piece in view.output] == ["stays\n"]
        assert [(one.ranks, one.data, one.metadata) for one in view.displays] == [((0, 1), figure, {"a": 1})]
        assert view.cleared == 1
    assert [one.data for one in log.displays()] == [{"text/html": "gone"}, figure, figure]


def test_half_a_line_at_the_end_is_left_alone(log: RunLog) -> None:
    feed(log, batch(0, range(3), loss=[1, 2, 3]))
    log.finish("ok")
    with (log.directory / "journal.jsonl").open("a") as file:
        file.write('{"kind": "metrics", "ru')
    assert len(log.metrics()) == 3


def test_a_run_that_is_taken_over_keeps_its_start_and_ended_with_its_last_record(log: RunLog) -> None:
    log.close()  # its notebook exits, and there is no summary
    assert log.summary == RunRecord.load(log.directory).summary == {}
    begun = log.started - 60
    write_json(log.directory / "run.json", read_json(log.directory / "run.json") | {"started": begun})
    spool = log.directory / "spool"
    spool.mkdir()
    for rank in range(2):
        rows, end = batch(rank, range(3), loss=[3, 2, 1]), ended(rank)
        kept = stamped(encode([rows]), begun + 30) + stamped(encode([end]), begun + 40)
        (spool / f"r1.{rank}").write_bytes(kept)
    taken = TakenOverLog(log.directory, spool)
    assert taken.wait_ended([0, 1], 45)
    summary = taken.finish("ok")
    assert summary["started"] == read_json(log.directory / "run.json")["started"] == begun
    assert summary["seconds"] == pytest.approx(40)
    assert [rank["status"] for rank in summary["ranks"]] == ["ok", "ok"]
    assert [row.step for row in taken.metrics()] == [0, 1, 2] * 2


def test_a_run_looks_the_same_to_another_notebook_while_it_runs_and_later(log: RunLog) -> None:
    waiting = {"operation": "allreduce", "name": "bucket 0", "sequence": 3, "seconds": 1.0, "missing": [1]}
    feed(log, Status("r1", 0, 1.0, 4, waiting, (2, 40), {"training": 2.0}), Load("r1", 0, 1000.0, {"cpu": 50.0}))
    feed(log, Params("r1", 0, {"lr": 0.1}), batch(0, range(3), loss=[3, 2, 1]), Output("r1", 1, "stdout", "so far\n"))
    followed = FollowedLog(log.directory)
    feed(log, batch(1, range(3), loss=[3, math.inf, 1]), Display("r1", 1, {"text/html": "x"}), Status("r1", 1, 1.0, 5))
    until(lambda: log.taken == log.received)
    until(lambda: 1 in followed.statuses())
    live, other = log.view(), followed.view()
    assert {rank: one.line for rank, one in followed.statuses().items()} == {0: 4, 1: 5}
    for one in (other, RunRecord.load(log.directory).view()):
        assert [rank.status for rank in one.ranks] == [rank.status for rank in live.ranks]
        assert [rank.step for rank in one.ranks] == [2, 2]
        assert (one.curves["loss"][0], one.loads, one.output) == (live.curves["loss"][0], live.loads, live.output)
        assert (one.displays, list(one.broken["loss"])) == (live.displays, [1])
    assert followed.params == log.params == {"lr": 0.1}
    feed(log, ended(0), ended(1))
    assert followed.wait_ended([0, 1], 45)
    summary = log.finish("ok")
    assert followed.finish("ok") == summary


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"run\.json"):
        RunRecord.load(tmp_path)


def test_a_truncated_message_is_reported_and_the_next_one_read(log: RunLog) -> None:
    log.put(encode([ended(0)])[:-3])
    feed(log, ended(1))
    assert log.wait_ended([1], 45)
    assert "truncated" in log.trouble
    log.finish("ok")


def test_a_rank_that_the_run_has_not_got_is_told(log: RunLog) -> None:
    feed(log, ended(7))
    feed(log, ended(1))
    assert log.wait_ended([1], 45)
    assert "rank 7" in log.trouble
    log.finish("ok")


def test_stuck_only_when_no_rank_moves(log: RunLog) -> None:
    waiting = {"operation": "allreduce", "name": "bucket 0", "sequence": 3, "seconds": 1.0, "missing": [1]}
    feed(log, Status("r1", 0, 1.0, line=2, waiting=waiting), Status("r1", 1, 1.0, line=3))
    feed(log, Output("r1", 1, "stdout", "hello\n"))
    time.sleep(0.3)
    # The same place again: a status alone is not progress.
    feed(log, Status("r1", 0, 2.0, line=2, waiting={**waiting, "seconds": 2.0}), Status("r1", 1, 2.0, line=3))
    feed(log, Status("r1", 1, 2.0, line=3))
    until(lambda: 0 in log.statuses() and log.statuses()[0].time == 2.0)
    assert [rank.rank for rank in log.view().stuck(after=0.25)] == [0, 1]
    moved = time.time()
    feed(log, Status("r1", 1, 3.0, line=4), ended(0))
    assert log.wait_ended([0], 45)
    view = log.view()
    assert view.stuck(after=time.time() - moved) == ()
    log.finish("interrupted")


@pytest.mark.slow
def test_40000_records_a_second_in_bounded_memory(tmp_path: Path) -> None:
    """A million rows: the writer keeps up with 40,000 a second, and its curves stay small."""
    log = RunLog(tmp_path / "r1", "r1", "long", 4, "", {}, {})
    rows, per_message = 1_000_000, 1000
    messages = [
        encode([batch(rank, range(start, start + per_message), loss=[0.5] * per_message)])
        for start in range(0, rows // 4, per_message)
        for rank in range(4)
    ]
    start = time.process_time()
    for message in messages:
        log.put(message)
    log.finish("ok")
    assert time.process_time() - start < rows / 40_000
    assert len(log.metrics()) == rows
    view = log.view()
    assert sum(len(points.x) for points in view.curves["loss"].values()) <= 4 * 400


def test_what_another_kernel_removes_meanwhile_reads_as_empty(tmp_path: Path) -> None:
    content = tmp_path / "a.json", tmp_path / "journal.jsonl"

    def come_and_go() -> None:
        for _ in range(1000):
            for path in content:
                path.write_text('{"rank": 0}\n')
            for path in content:
                path.unlink()

    other = Thread(target=come_and_go)
    other.start()
    while other.is_alive():
        assert read_text(content[0]) in ("", '{"rank": 0}\n')
        assert read_json(content[0]) in ({}, {"rank": 0})
        assert list(Journal(tmp_path / "journal.jsonl").records()) == []
    other.join()
