"""A disk that fills up during a run: the run continues and says so, and nothing that fits anywhere is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.waiting import until
from ring_notebook.engine.publisher import Spool
from ring_notebook.notebook.panel.report import mime_bundle
from ring_notebook.notebook.record import run_files
from ring_notebook.notebook.record.run_files import Journal
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.protocol.records import Ended, MetricBatch, Output, encode

ROWS = 1000  # of a message


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of half a megabyte."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED with a full disk: only root can mount a small one")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def new_log(disk: Path) -> RunLog:
    return RunLog(disk / "runs" / "r1", "r1", "first", 1, "train()\n", {}, {})


def feed(log: RunLog, steps: range) -> None:
    for start in steps[::ROWS]:
        values = array("d", (value for step in range(start, start + ROWS) for value in (1000.0, step, step / 2)))
        log.put(encode([MetricBatch("r1", 0, ("loss",), values)]))


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return ballast


def finish(log: RunLog) -> None:
    log.put(encode([Output("r1", 0, "stdout", "the end\n"), Ended("r1", 0, "ok", 1.0)]))
    assert log.wait_ended([0], 20)
    log.finish("ok")


def test_records_wait_in_memory_until_there_is_room(disk: Path) -> None:
    log = new_log(disk)
    ballast = fill(disk)
    feed(log, range(10 * ROWS))
    until(lambda: "No space left on device" in log.trouble)
    assert "the run continues" in log.trouble
    ballast.unlink()
    until(lambda: not log.trouble)
    finish(log)
    assert "trouble" not in log.summary
    for record in (log, RunRecord.load(log.directory)):
        assert [row.step for row in record.metrics()] == list(range(10 * ROWS))


def test_a_disk_that_stays_full(disk: Path) -> None:
    log = new_log(disk)
    feed(log, range(5 * ROWS))
    until(lambda: log.taken == 5)
    fill(disk)
    feed(log, range(5 * ROWS, 40 * ROWS))
    finish(log)
    record = RunRecord.load(log.directory)
    assert record.status == log.status == "ok"
    assert record.summary["ranks"][0]["status"] == "ok"
    assert [row.step for row in record.metrics()] == list(range(40 * ROWS))
    assert [piece.text for piece in record.view().output] == ["the end\n"]
    for shown in mime_bundle(record).values():
        assert f"the newest records are in {record.summary['rest']}" in shown
    assert "class='ring-notice ring-alert'" in mime_bundle(record)["text/html"]
    shutil.rmtree(record.summary["rest"])


def test_of_more_than_memory_may_hold_the_newest_stay(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "_MOST_KEPT", 500_000)
    monkeypatch.setattr(run_files, "_WRITE_AT", 50_000)
    log = new_log(disk)
    fill(disk)
    feed(log, range(100 * ROWS))
    finish(log)
    steps = [row.step for row in log.metrics()]
    assert steps == list(range(100 * ROWS - len(steps), 100 * ROWS))
    assert 10 * ROWS < len(steps) < 30 * ROWS
    lost = 100 - len(steps) // ROWS
    assert f"{lost} older ones are lost" in log.summary["trouble"]
    shutil.rmtree(log.summary["rest"])


def test_a_run_that_starts_on_a_full_disk_is_recorded_elsewhere(disk: Path) -> None:
    fill(disk)
    log = new_log(disk)
    assert log.directory.name == "r1"
    assert f"this run is recorded in {log.directory}" in log.trouble
    feed(log, range(ROWS))
    finish(log)
    assert len(RunRecord.load(log.directory).metrics()) == ROWS
    assert "this run is recorded in" in mime_bundle(log)["text/plain"]
    shutil.rmtree(log.directory.parent)


def test_a_rank_that_keeps_its_records_survives_a_full_disk(disk: Path) -> None:
    spool = Spool(disk / "spool", 0)
    spool.begin("r1")
    messages = [encode([Output("r1", 0, "stdout", text)]) for text in ("first", "x" * 100_000, "y" * 100_000, "last")]
    assert spool.add(messages[0]) == ""
    ballast = fill(disk)
    assert "No space left on device" in spool.add(messages[1])
    assert spool.add(messages[2]) == "", "once is enough"
    ballast.unlink()
    assert spool.add(messages[3]) == ""
    assert [line for line, _ in Journal(disk / "spool" / "r1.0").lines()] == messages
