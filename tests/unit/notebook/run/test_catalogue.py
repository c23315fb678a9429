"""The runs on disk: foreign and truncated files among them are skipped with a line, and spoil nothing."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ring_notebook.errors import RingError
from ring_notebook.notebook.cluster import cluster_folders
from ring_notebook.notebook.record.cell_constants import constants, with_constants
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.run import catalogue
from ring_notebook.notebook.run.export import export
from ring_notebook.notebook.run.pages import write_pages
from ring_notebook.notebook.run.send_cell import spoken_name
from ring_notebook.notebook.run.takeover import journals_of, runs_in_progress
from ring_notebook.notebook.run.trackers import to_csv
from ring_notebook.notebook.table import Listing
from ring_notebook.protocol.records import Change, MetricBatch, Params, encode

SPOILED = {
    "truncated": '{"run": "r", "na',
    "empty": "",
    "a list": "[1, 2]",
    "another program's": '{"version": 3}',
    "of other types": json.dumps(dict.fromkeys(["run", "name", "size", "source", "options", "environment", "started"])),
    "binary": "\x00\x01",
}


@pytest.fixture
def runs(tmp_path: Path, settings: Callable[..., None]) -> Path:
    settings(runs_dir=tmp_path / "ring" / "runs")
    return tmp_path / "ring" / "runs"


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
    listed = catalogue.listing(every=True)
    ids = [row[listed.columns.index("run")] for row in listed.rows]
    assert ids.count("2-good") == 1
    if file == "run.json" or spoiled != "empty":
        assert "skipped: " in listed.note
        assert str(other.directory) in listed.note
    assert catalogue.find("good").run == "2-good"
    assert export(log, tmp_path / "script.py").cells == 1
    assert runs_in_progress(runs, "c1") == []
    with pytest.raises(RingError, match=r"no run 'nothing' in .*; the newest are 'good'; `%ring runs` lists them"):
        catalogue.find("nothing")


def test_a_metric_is_the_mean_of_the_ranks_that_have_it(runs: Path) -> None:
    """As in the report and in a comparison."""
    log = RunLog(runs / "1-two", "1-two", "two", 2, "print(1)\n", {}, {})
    for rank, names in ((0, ("loss", "val_loss")), (1, ("loss",))):
        log.put(
            encode([MetricBatch("1-two", rank, names, array("d", (time.time(), 0, rank + 1.0, 7.0)[: 2 + len(names)]))])
        )
    log.finish("ok")
    listed = catalogue.listing()
    assert [listed.rows[0][listed.columns.index(name)] for name in ("loss", "val_loss")] == ["1.5", "7"]


def without_end(runs: Path, name: str, cluster: str, silent: float, started: float = 0.0) -> RunLog:
    """A run without a summary, whose last record came ``silent`` seconds ago."""
    log = RunLog(runs / name, name, "", 1, "print(1)\n", {}, {"cluster": cluster}, started)
    for file in log.directory.iterdir():
        os.utime(file, (time.time() - silent,) * 2)
    return log


def gone() -> int:
    """The process id of a process that has ended."""
    with subprocess.Popen("true") as process:
        return process.pid


def test_a_run_without_an_end_is_in_progress_or_lost(runs: Path) -> None:
    """It is deleted only when no kernel or rank can be writing it."""
    here, other = socket.gethostname(), f"{socket.gethostname()}-other"
    with subprocess.Popen(["sleep", "600"]) as kernel:
        directory = cluster_folders.new_directory(keep=True)
        made = directory.name.replace(str(os.getpid()), str(gone()), 1)
        attached = directory.rename(directory.with_name(made))
        about = {"n": 1, "why": "", "keep": True, "met": True, "formation": 0, "launcher": 0, "engines": []}
        cluster_folders.write(attached, {**about, "controller": gone()})  # this kernel has attached to it
        young = f"{kernel.pid}-0123abcd-{here}"  # a later process of the number of a kernel that is gone
        found = {
            "1-attached": without_end(runs, "1-attached", attached.name, 7200),
            "2-gone": without_end(runs, "2-gone", f"{gone()}-0123abcd-{here}", 7200),
            "3-young": without_end(runs, "3-young", young, 7200),
            "4-writes": without_end(runs, "4-writes", f"{gone()}-0123abcd-{here}", 5),
            "5-elsewhere": without_end(runs, "5-elsewhere", f"{gone()}-0123abcd-{other}", 7200),
            "6-long-ago": without_end(runs, "6-long-ago", f"{gone()}-0123abcd-{other}", 90_000),
            "7-here": without_end(runs, "7-here", f"{os.getpid()}-0123abcd-{here}", 7200, time.time()),
            "9-open": without_end(runs, "9-open", young, 7200, time.time()),  # of another notebook
            "8-ranks": without_end(runs, "8-ranks", f"{gone()}-4567abcd-{here}", 7200),
        }
        kept = journals_of(Path(found["8-ranks"].environment["cluster"]))
        kept.mkdir(parents=True)
        (kept / "8-ranks.0").touch()
        listed = catalogue.listing(lives=cluster_folders.lives)
        column = {name: [row[listed.columns.index(name)] for row in listed.rows] for name in ("run", "status")}
        status = dict(zip(column["run"], column["status"], strict=True))
        assert status == {
            **dict.fromkeys(("1-attached", "4-writes", "7-here", "8-ranks", "9-open"), "running"),
            **dict.fromkeys(("2-gone", "3-young", "6-long-ago"), "lost"),
            "5-elsewhere": "running or lost",
        }
        for name, log in found.items():
            if status[name] == "lost":
                assert catalogue.delete([name], cluster_folders.lives) == f"Deleted {name}."
                assert not log.directory.exists()
                continue
            where = "in its notebook" if status[name] == "running" else "a day after its last record"
            with pytest.raises(RingError, match=f"run {name} has not ended.*{where}"):
                catalogue.delete([name], cluster_folders.lives)
            assert log.directory.exists()
        kernel.kill()
    cluster_folders.remove(attached)


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)],
    ids=["a pipe", "a folder", "a link to a device"],
)
@pytest.mark.parametrize("file", ["run.json", "summary.json", "journal.jsonl"])
def test_what_is_no_file(runs: Path, file: str, make: Callable[[Path], None]) -> None:
    """Who opens a named pipe waits for a writer, for ever."""
    good(runs)
    other = good(runs, "1-spoiled")
    path = other.directory / file
    path.unlink(missing_ok=True)
    make(path)
    listed = catalogue.listing(every=True)
    ids = [row[listed.columns.index("run")] for row in listed.rows]
    assert ids == ["2-good"] + ["1-spoiled"] * (file == "journal.jsonl")
    assert ("skipped: " in listed.note) == (file != "journal.jsonl")
    if file == "journal.jsonl":
        with pytest.raises((OSError, ValueError)):
            RunRecord.load(other.directory).metrics()


def test_lines_that_are_no_records_are_skipped_and_counted(runs: Path) -> None:
    log = good(runs)
    with (log.directory / "journal.jsonl").open("a") as file:
        file.write('truncat\n{"other": 1}\n[]\n7\n{"time": "now"}\n\n')
        file.write('{"kind": "metrics", "run": "r", "rank": 0, "names": ["loss"], "values": "AAAA"}\n')
        file.write('{"kind": "cleared", "run": "r", "rank": 7}\n')
    record = RunRecord.load(log.directory)
    assert record.trouble == f"8 lines in {log.directory} are no records of a run and were skipped"
    assert len(record.metrics()) == 0
    assert record.displays() == []


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a pipe", "a folder"])
def test_a_cluster_whose_file_is_none_stops_no_start(runs: Path, make: Callable[[Path], None]) -> None:
    make(cluster_folders.new_directory() / "cluster.json")
    assert [cluster_folders.read(path) for path in cluster_folders.running()] == [{}]


@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_spoiled_cluster_is_not_found_and_stops_no_start(runs: Path, spoiled: str) -> None:
    folder = cluster_folders.new_directory()
    (folder / "cluster.json").write_text(SPOILED[spoiled])
    foreign = folder.parent / f"notes-of-{folder.name.partition('-')[2].partition('-')[2]}"
    foreign.mkdir()
    assert all(not cluster_folders.read(path) for path in cluster_folders.running())
    again = cluster_folders.new_directory()
    assert again.is_dir()
    assert foreign.is_dir()


def logged(
    runs: Path, name: str, metrics: Sequence[str], *ranks: Sequence[Sequence[float]], source: str = ""
) -> RunLog:
    """A run of 20 s whose ranks have logged these rows: a value of each metric at steps 0, 1, ..."""
    log = RunLog(runs / name, name, name.partition("-")[2], len(ranks), source, {}, {}, time.time() - 20)
    for rank, rows in enumerate(ranks):
        values = array("d", (one for step, row in enumerate(rows) for one in (log.started + step, step, *row)))
        log.put(encode([MetricBatch(name, rank, tuple(metrics), values)]))
    return log


def trained(runs: Path, name: str, lr: float, loss: float) -> RunLog:
    source = f"lr, layers = {lr}, 3\nfor x in data:\n    train(x)\n"
    log = logged(runs, name, ["loss"], [[loss + 1], [loss]], source=source)
    log.put(encode([Params(name, 0, {"optimizer": "SGD", "lr": lr})]))
    log.finish("ok")
    return log


def listed(**options: Any) -> list[str]:
    found = catalogue.listing(**options)
    return [row[found.columns.index("run")] for row in found.rows]


def test_runs_are_sorted_and_filtered(runs: Path) -> None:
    for name, lr, loss in (("1-small", 0.01, 0.3), ("2-large", 1.0, 0.1), ("3-usual", 0.1, 0.2)):
        trained(runs, name, lr, loss)
    good(runs, "4-trivial")
    assert listed() == ["3-usual", "2-large", "1-small"]
    assert "1 short cell without metrics not listed" in catalogue.listing().note
    assert listed(every=True)[0] == "4-trivial"
    assert listed(sort="loss") == ["1-small", "3-usual", "2-large"]
    assert listed(sort="-lr") == ["1-small", "3-usual", "2-large"]
    assert listed(sort="-lr", every=True)[-1] == "4-trivial"  # has none
    for written in ("0.1", "1e-1", ".1", "0.10"):
        assert listed(where=[f"lr={written}"]) == ["3-usual"], written
    assert listed(where=["lr=text"]) == []
    assert listed(where=["SGD", "large"]) == ["2-large"]


def test_tags_and_notes_stay_with_a_run(runs: Path) -> None:
    trained(runs, "1-small", 0.01, 0.3)
    assert "tags" not in catalogue.listing().columns
    assert catalogue.tag("small", ["baseline", "paper"]) == "small: baseline paper"
    catalogue.tag("small", ["paper", "final"])
    catalogue.annotate("small", "the seed of the paper")
    found = catalogue.listing()
    beside = found.columns.index("name") + 2  # behind the curve, where no page cuts them off
    assert list(found.columns[beside : beside + 2]) == ["tags", "note"]
    assert list(found.rows[0][beside : beside + 2]) == ["baseline paper final", "the seed of the paper"]
    assert listed(where=["final"]) == ["1-small"]
    assert catalogue.tag("small", []) == "small: no tags"


def test_a_whole_name_is_not_the_beginning_of_another(runs: Path) -> None:
    for number, name in enumerate(("small", "smaller", "small2")):
        trained(runs, f"{number}-{name}", 0.01, 0.3)
    assert [catalogue.find(name).run for name in ("small", "smaller", "smal")] == ["0-small", "1-smaller", "2-small2"]


def test_runs_are_deleted_when_they_have_ended(runs: Path) -> None:
    old, other = trained(runs, "1-small", 0.01, 0.3), trained(runs, "2-large", 1.0, 0.1)
    (other.directory / "summary.json").unlink()
    with pytest.raises(RingError, match="2-large has not ended"):
        catalogue.delete(["small", "large"], cluster_folders.lives)
    assert old.directory.exists()
    assert catalogue.delete(["small", "1-small"], cluster_folders.lives) == "Deleted 1-small."
    assert not old.directory.exists()


def test_a_comparison_says_what_was_set_and_what_came_out(runs: Path) -> None:
    trained(runs, "1-small", 0.01, 0.3)
    failed = trained(runs, "2-large", 1.0, 0.1)
    summary = json.loads((failed.directory / "summary.json").read_text())
    summary |= {"status": "failed", "error": "rank 0: ValueError: no <data>\nmore"}
    (failed.directory / "summary.json").write_text(json.dumps(summary))
    made = catalogue.compare(["small", "large"])
    page = made._repr_html_()
    assert "<td style='text-align:left'>lr</td>" in page
    assert "layers" not in page.partition("<svg")[0].partition("<details")[0]
    assert "Their cells differ." in page
    assert "<img" in page
    assert "no &lt;data&gt;" in page
    assert {row[0]: row[1:] for row in made.settings().rows} == {"lr": ["0.01", "1"]}
    rows = {row[0]: row[1:] for row in made.outcome().rows}
    assert rows["status"] == ["ok", "failed"]
    assert rows["error"] == ["", "rank 0: ValueError: no <data>"]
    assert all(float(seconds) >= 20 for seconds in rows["seconds"])
    assert rows["loss"] == ["0.3", "0.1"]
    assert rows["best loss"] == ["0.3 (step 1)", "0.1 (step 1)"]
    text = repr(made)
    assert "-lr, layers = 0.01, 3\n+lr, layers = 1.0, 3" in text
    assert "rank 0: ValueError: no <data>" in text


def test_the_name_of_a_sweep_alone_compares_all_its_runs(runs: Path) -> None:
    for name in ("1-sw lr=1", "2-sw lr=2", "3-sw lr=2", "4-swing lr=9"):  # the second one was run again
        logged(runs, name, ["acc"], [[0.5]]).finish("ok")
    made = catalogue.compare(["sw"]).outcome()
    assert made.columns[1:] == ("sw lr=1", "sw lr=2")
    logged(runs, "5-sw", ["acc"], [[0.5]]).finish("ok")
    assert catalogue.compare(["sw"]).outcome().columns[1:] == ("sw",), "a run of this very name comes first"


def test_two_names_of_one_run_are_no_comparison(runs: Path) -> None:
    for number in (1, 2):
        trained(runs, f"{number}-same", 0.1, 1.0)
    with pytest.raises(RingError, match="'same' is 2-same again, the newest run of that name"):
        catalogue.compare(["2-same", "same"])


def test_a_list_without_runs_says_where_it_has_looked(runs: Path) -> None:
    assert f"no runs in {runs}" in str(catalogue.listing())
    trained(runs, "1-a", 0.1, 1.0)
    assert "no runs with these words" in str(catalogue.listing(where=["xyz"]))


def test_a_best_value_may_be_an_earlier_one(runs: Path) -> None:
    logged(runs, "1-a", ["acc"], [[0.5], [0.9], [0.7]], [[0.52], [0.92], [0.72]]).finish("ok")
    alone = catalogue.compare(["a"]).settings()
    assert (alone.columns[0], alone.rows[0][0], alone.note) == ("set", "ranks", ""), "it differs from nothing"
    rows = {row[0]: row[1] for row in catalogue.compare(["a"]).outcome().rows}
    assert (rows["acc"], rows["best acc"]) == ("0.71", "0.91 (step 1)")


def changed(runs: Path, name: str, branch: dict[str, Any], *changes: tuple[int, float]) -> RunLog:
    """A run with changes of its lr behind these steps."""
    log = RunLog(runs / name, name, name.partition("-")[2], 1, "layers = 3\n", {"branch": branch}, {})
    for number, (step, lr) in enumerate(changes, start=1):
        log.put(encode([Change(name, 0, log.started, number, "set", {"lr": lr}, "a user", step, step)]))
    return log


def test_a_branch_has_what_its_run_was_set_to_until_then(runs: Path) -> None:
    origin = changed(runs, "1-a", {}, (10, 0.5), (90, 0.2))
    origin.put(encode([Params("1-a", 0, {"optimizer": "SGD", "lr": 1.0})]))
    changed(runs, "2-a", {}, *((step, 7.0) for step in range(9))).finish("ok")  # of the same name, and another run
    second = changed(runs, "3-b", {"of": "a@50", "run": "1-a"}, (60, 0.4))
    third = changed(runs, "4-c", {"of": "b@55", "run": "3-b"}, (70, 0.3))
    for log in (origin, second, third):
        log.finish("ok")
    made = catalogue.compare(["1-a", "2-a", "b", "c"])
    rows = {row[0]: row[1:] for row in made.settings().rows}
    assert rows["lr"] == [
        "1, then 0.5 from step 10, then 0.2 from step 90",
        "9 changes, the last to 7 from step 8",
        "1, then 0.5 from step 10, then 0.4 from step 60",
        "1, then 0.5 from step 10, then 0.3 from step 70",
    ]
    assert rows["optimizer"] == ["SGD", "", "SGD", "SGD"]
    assert rows["branch of"] == ["", "", "a@50", "b@55"]
    begins = catalogue.with_inherited({"branch": {"of": "b@65", "run": "3-b"}})
    assert begins["branch"]["params"] == {"layers": 3, "lr": 0.4}, "of an older record, without those of its origin"
    begins = catalogue.with_inherited({"branch": {"of": "a@50", "run": "1-a"}})
    assert begins["branch"]["params"] == {"layers": 3, "optimizer": "SGD", "lr": 0.5}
    fourth = changed(runs, "5-d", begins["branch"], (70, 0.3))
    assert fourth.params["lr"] == 0.5
    fourth.finish("ok")
    listed = catalogue.listing(every=True)
    assert {row[0]: row[listed.columns.index("optimizer")] for row in listed.rows}["d"] == "SGD"
    (row,) = [row for row in catalogue.compare(["1-a", "d"]).settings().rows if row[0] == "lr"]
    assert row[2] == "1, then 0.5 from step 10, then 0.3 from step 70"
    assert made.settings().note == "They ran the same cell."
    catalogue.delete(["1-a"], cluster_folders.lives)
    assert {row[0]: row[1:] for row in catalogue.compare(["b", "c"]).settings().rows}["lr"][0] == "0.4 from step 60"
    (row,) = [row for row in catalogue.compare(["c", "d"]).settings().rows if row[0] == "lr"]
    assert row[2] == "0.5, then 0.3 from step 70"


def test_all_runs_as_pages_for_a_web_server(runs: Path, tmp_path: Path) -> None:
    for name, lr in (("1-small", 0.01), ("2-<large>", 1.0)):
        trained(runs, name, lr, 0.1)
    good(runs, "3-trivial")
    site = tmp_path / "site" / "of runs"
    told = write_pages(site)
    assert told == f"Wrote 2 runs to {site / 'index.html'}; the folder can be hosted as it is."
    assert sorted(path.name for path in site.iterdir()) == ["1-small.html", "2-<large>.html", "index.html"]
    index = (site / "index.html").read_text()
    assert re.findall("<a href='([^']+)'>", index) == ["2-%3Clarge%3E.html", "1-small.html"]
    page = (site / "1-small.html").read_text()
    assert "<script" not in index + page
    assert "<img alt='loss over step" in page
    assert "<title>small</title>" in page
    write_pages(site, every=True)
    assert (site / "3-trivial.html").exists()
    (tmp_path / "index.html").write_text("mine")
    with pytest.raises(RingError, match=r"index\.html was not written by"):
        write_pages(tmp_path)


def test_metrics_of_one_run_or_of_several_are_plotted(runs: Path) -> None:
    records = [trained(runs, "1-small", 0.01, 0.3), trained(runs, "2-large", 1.0, 0.1)]
    for given in (records[:1], records):
        page = catalogue.plot(given, ["loss"], x="time", smooth=0.5, log=True).data
        assert re.findall("<img alt='([^:]+):", page) == ["loss over seconds"]
    with pytest.raises(RingError, match="no metric 'los'; it logged: loss"):
        catalogue.plot(records, ["loss+los"])
    with pytest.raises(RingError, match="no x axis 'epoch'"):
        catalogue.plot(records, ["loss"], x="epoch")


def test_parameters_are_those_of_the_cell_and_of_rank_0(runs: Path) -> None:
    log = RunLog(runs / "r", "r", "", 2, "a = 1\nb, c = 'x', [1]\nd: float = 0.5\n_e = 3\nif a:\n    f = 2\n", {}, {})
    log.put(encode([Params("r", 1, {"lr": 0.2, "own": 1}), Params("r", 0, {"lr": 0.1, "a": 7})]))
    log.finish("ok")
    assert log.params == {"a": 7, "b": "x", "d": 0.5, "lr": 0.1, "own": 1}
    assert RunRecord.load(log.directory).params == log.params
    assert constants("!ls") == {}


def test_a_variable_of_the_cell_is_no_parameter() -> None:
    cell = (
        "epochs, lr = 3, 0.1\nstep = 0\nbest = 1e9\ntotal: float = 0.0\nlr = 0.2\nn = 5\n"
        "for epoch in range(epochs):\n    step += 1\n    best = min(best, loss)\n"
        "    if loss: total = loss\n"
        "def train():\n    n = 6\n"
        "squares = [n * n for n in range(n)]\n"
    )
    assert constants(cell) == {"epochs": 3, "lr": 0.2, "n": 5}


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("done, losses = 0, {}\ntrain(model, 160)\n", {}),  # counted by `train`, which another cell has defined
        ("stop = False\nLR = 0.1\ntrain()\n", {"LR": 0.1}),
        ("seed, decay = 0, 0.0\ntrain(seed, decay)\n", {"seed": 0, "decay": 0.0}),
        ("seen = 5\ndef note():\n    global seen\n    seen += 1\n", {}),
        ("n = 5\nclass A:\n    n = 6\n", {"n": 5}),
        ("best = 9.0\nwhile better():\n    best = loss()\n", {}),
        ("use_bias = False\nnet = Linear(8, bias=use_bias)\n", {"use_bias": False}),
        ("x = 1\nx += 1\ny = 2\nif (y := f()): pass\n", {}),
        ("i = 3\nwith open(p) as i: pass\nj = 4\nfor k, j in z: pass\nm = 8\n", {"m": 8}),
    ],
)
def test_what_a_user_would_call_a_hyper_parameter(cell: str, expected: dict[str, object]) -> None:
    assert constants(cell) == expected


def test_a_run_without_a_name_is_found_by_that_of_the_list(runs: Path) -> None:
    log = trained(runs, "1", 0.25, 0.5)
    assert log.name == ""
    (row,) = catalogue.listing().rows
    assert row[0] == "lr, layers = 0.25, 3"
    assert catalogue.find("lr, layers = 0.25").run == "1"


def test_rows_as_csv(runs: Path, tmp_path: Path) -> None:
    log = trained(runs, "1-small", 0.01, 0.5)
    lines = to_csv(log, tmp_path / "rows.csv").read_text().splitlines()
    assert lines[0] == "rank,time,step,loss"
    assert [line.split(",")[2:] for line in lines[1:]] == [["0", "1.5"], ["1", "0.5"]]


def test_a_page_can_sort_the_list_by_columns_parameters_and_metrics(runs: Path) -> None:
    for name, lr, loss in (("1-small", 0.01, 0.3), ("2-large", 1.0, 0.1), ("3-usual", 0.1, 0.2)):
        trained(runs, name, lr, loss)
    silent = good(runs, "4-silent")
    catalogue.tag("4-silent", ["kept"])
    assert silent.directory.exists()
    listed = catalogue.listing()
    page = listed._repr_html_()
    names = list(listed.keys)
    assert {"seconds", "name", "lr", "loss"} <= set(names)
    index = names.index("loss")
    orders = {
        way: [int(place) for place in re.findall(rf"--{way}{index}:(\d+)", page)] for way in "ad"
    }  # of the rows 4-silent, 3-usual, 2-large, 1-small
    assert orders == {"a": [3, 1, 0, 2], "d": [3, 1, 2, 0]}
    assert page.count("<tr style='--") == 4
    assert "title='lr: largest first'" in page
    assert f"[value=d{index}]:checked) tbody tr {{ order: var(--d{index}); }}" in page


def test_runs_without_a_number_are_last_either_way(runs: Path) -> None:
    for name, loss in (("1-good", 0.3), ("2-broken", float("nan")), ("3-best", 0.1)):
        trained(runs, name, 0.1, loss)
    assert listed(sort="loss") == ["1-good", "3-best", "2-broken"]
    assert listed(sort="-loss") == ["3-best", "1-good", "2-broken"]
    with pytest.raises(RingError, match=r"no run has a column 'accuracy'; the columns are name, status, .*loss"):
        catalogue.listing(sort="accuracy")


def test_columns_that_differ_come_first_and_the_rest_is_folded(runs: Path) -> None:
    for number in range(3):
        metrics, values = [f"metric_{index:02}" for index in range(20)], [number * 20.0 + index for index in range(20)]
        logged(runs, f"{number}-many", metrics, [values], source=f"lr = {number}\nlayers = 3\n").finish("ok")
    found = catalogue.listing()
    shown = [name for name in found.columns if name not in found.folded]
    assert shown[:4] == ["name", "curve", "metric_00", "lr"]
    assert len(shown) < 18
    assert {"layers", "metric_19"} <= set(found.folded)
    page = found._repr_html_()
    assert "<summary>more columns</summary>" in page
    index = list(found.columns).index("layers")
    assert re.search(rf"\.ring-\w+:not\(:has\(\[value=c{index}\]:checked\)\) \.c{index} {{ display: none; }}", page)
    assert "layers" not in repr(found).splitlines()[0]


def test_a_value_is_that_of_a_step_that_all_ranks_have_made(runs: Path) -> None:
    ranks = [[[10.0 * step + rank] for step in range(steps)] for rank, steps in enumerate((5, 3))]
    logged(runs, "1-uneven", ["loss"], *ranks).finish("ok")
    found = catalogue.listing()
    assert found.rows[0][list(found.columns).index("loss")] == "20.5"


def test_what_most_runs_have_comes_first(runs: Path) -> None:
    for name, metrics in (("1-first", ("loss",)), ("2-second", ("loss",)), ("3-newest", ("own", "loss"))):
        logged(runs, name, metrics, [[float(name[0])] * len(metrics)]).finish("ok")
    columns = [one for one in catalogue.listing().columns if one in ("own", "loss")]
    assert columns == ["loss", "own"]


def test_a_run_shows_the_curve_of_its_main_metric(runs: Path) -> None:
    log = trained(runs, "1-small", 0.01, 0.3)
    trained(runs, "2-broken", 0.01, float("nan"))
    assert log.summary["curve"] == {"metric": "loss", "values": [1.3, 0.3]}
    found = catalogue.listing()
    column = list(found.columns).index("curve")
    assert [row[column] for row in found.rows] == ["", "█▁"]
    assert "data:image/svg+xml" in found.pictures["curve"][1]
    assert found.pictures["curve"][0] == ""


def test_a_name_that_people_can_say(tmp_path: Path) -> None:
    assert re.fullmatch(r"[a-z]+-[a-z]+-1", spoken_name(tmp_path / "not there"))
    (tmp_path / "run").mkdir()
    assert spoken_name(tmp_path).endswith("-2")


def test_a_list_of_one_run_has_nothing_to_sort(runs: Path) -> None:
    trained(runs, "1-small", 0.01, 0.3)
    assert "<input" not in catalogue.listing()._repr_html_()


def test_a_list_without_rows_is_its_note_alone() -> None:
    assert Listing(["cell", "name"], [], "No cell waits.")._repr_html_() == "<p>No cell waits.</p>"


def test_other_values_take_the_places_of_constants() -> None:
    cell = 'ä, lr = "ü", 0.1  # usual\nsteps: int = (\n    3\n)\nlr = -0.2\nprint(lr)\n'
    swept = with_constants(cell, {"lr": 1e-3, "steps": 5})
    assert swept == 'ä, lr = "ü", 0.001  # usual\nsteps: int = (\n    5\n)\nlr = 0.001\nprint(lr)\n'
    assert with_constants('a = """x\ny"""\nb = 1\n', {"a": "z"}) == "a = 'z'\n\nb = 1\n"
    assert with_constants("clip = None\n", {"clip": -1e-5}) == "clip = -1e-05\n"
    assert constants("clip = None\nprint(clip)\n") == {}
    for wrong in ("for lr in data: pass\n", "lr = net()\n", "if True:\n    lr = 1\n"):
        with pytest.raises(RingError, match="no constant 'lr'; write lr = 2 on a line of its own"):
            with_constants(wrong, {"lr": 2})
    with pytest.raises(RingError, match="begin with % or !"):
        with_constants("!ls\nlr = 1\n", {"lr": 2})
