"""The runs on disk: foreign and truncated files among them are skipped with a line, and spoil nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ring_notebook.config import config
from ring_notebook.errors import RingError
from ring_notebook.notebook.cluster import discovery
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.run import catalogue
from ring_notebook.notebook.run.export import export
from ring_notebook.notebook.run.takeover import run_in_progress

SPOILED = {
    "truncated": '{"run": "r", "na',
    "empty": "",
    "a list": "[1, 2]",
    "another program's": '{"version": 3}',
    "of other types": json.dumps(dict.fromkeys(["run", "name", "size", "source", "options", "environment", "started"])),
    "binary": "\x00\x01",
}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("RING_RUNS_DIR", str(tmp_path / "ring" / "runs"))
    config.cache_clear()
    yield tmp_path / "ring" / "runs"
    config.cache_clear()


def good(runs: Path, name: str = "2-good") -> RunLog:
    environment = {"cluster": "c1", "hosts": ["a"]}
    log = RunLog(runs / name, name, "good", 1, "print(1)\n", {"setup": True}, environment)
    log.finish("ok")
    return log


@pytest.mark.parametrize("spoiled", SPOILED)
@pytest.mark.parametrize("file", ["run.json", "summary.json"])
def test_a_spoiled_file(runs: Path, tmp_path: Path, file: str, spoiled: str) -> None:
    log, other = good(runs), good(runs, "1-spoiled")
    (other.directory / file).write_text(SPOILED[spoiled])
    listed = catalogue.listing()
    assert [row[0] for row in listed.rows if row[0] == "2-good"] == ["2-good"]
    if file == "run.json" or spoiled != "empty":
        assert "skipped: " in listed.note
        assert str(other.directory) in listed.note
    assert catalogue.find("good").run == "2-good"
    assert export(log, tmp_path / "script.py").cells == 1
    assert run_in_progress(runs, "c1") is None
    with pytest.raises(RingError, match="no run 'nothing'"):
        catalogue.find("nothing")


def test_lines_that_are_no_records_are_skipped_and_counted(runs: Path) -> None:
    log = good(runs)
    for name in ("metrics.jsonl", "output.jsonl", "events.jsonl"):
        with (log.directory / name).open("a") as file:
            file.write('truncat\n{"other": 1}\n[]\n7\n{"rank": 0, "names": ["loss"], "rows": "AAAA"}\n')
    record = RunRecord.load(log.directory)
    assert record.trouble == f"15 lines in {log.directory} are no records of a run and were skipped"
    assert len(record.metrics()) == 0
    assert record.displays() == []


@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_spoiled_cluster_is_not_found_and_stops_no_start(runs: Path, spoiled: str) -> None:
    folder = discovery.new_directory()
    (folder / "cluster.json").write_text(SPOILED[spoiled])
    foreign = folder.parent / f"notes-of-{folder.name.partition('-')[2].partition('-')[2]}"
    foreign.mkdir()
    assert all(not discovery.read(path) for path in discovery.running())
    again = discovery.new_directory()
    assert again.is_dir()
    assert foreign.is_dir()
