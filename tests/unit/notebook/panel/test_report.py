"""The still report, the table of ranks and the stuck notice, from real records."""

from __future__ import annotations

import base64
import html
import re
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from harness.waiting import until
from ring_notebook.core import metrics
from ring_notebook.notebook.colors import GREY, RED, STATUS_COLORS
from ring_notebook.notebook.panel import headline, rank_table, report, waits
from ring_notebook.notebook.panel.comparison import Comparison
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.record.run_record import first_line
from ring_notebook.notebook.run import catalogue
from ring_notebook.notebook.run.trackers import to_media
from ring_notebook.notebook.style import ago, duration, whole
from ring_notebook.protocol.records import Display, Ended, Load, MetricBatch, Output, Record, Status, encode
from ring_notebook.text.words import rank_list


def run(directory: Path, size: int, *more: Record, steps: int = 60, status: str = "ok", error: str = "") -> RunLog:
    log = RunLog(directory, directory.name, "digits <1>", size, "", {}, {})
    for rank in range(size):
        values = array("d")
        for step in range(steps):
            values.extend((log.started + step / 20, step, 1 / (step + 1) + rank, 32.0))
        batch = MetricBatch(log.run, rank, ("loss", "samples"), values)
        log.put(encode([batch, Output(log.run, rank, "stdout", "epoch 1\n")]))
    log.put(encode(more))
    if not any(isinstance(record, Ended) for record in more):
        log.put(encode([Ended(log.run, rank, "ok", 3.0) for rank in range(size)]))
    log.finish(status, error)
    return log


def images(page: str) -> list[ElementTree.Element]:
    """The charts, without the labels of their y axes."""
    found = re.findall(r"<img alt='[^']+' [^>]*src='data:image/svg\+xml;base64,([^']+)'", page)
    return [ElementTree.fromstring(base64.b64decode(data)) for data in found]


def texts(image: ElementTree.Element) -> list[str]:
    """Every text, a title with its note as one, and the title alone."""
    found = ["".join(element.itertext()) for element in image.iter("{http://www.w3.org/2000/svg}text")]
    return [*found, *(element.text or "" for element in image.iter("{http://www.w3.org/2000/svg}tspan"))]


def test_the_page_has_charts_table_and_output(tmp_path: Path) -> None:
    page = report.mime_bundle(run(tmp_path / "r1", 2))["text/html"]
    loss, rate = images(page)
    assert {"loss", "rank 0", "rank 1"} <= set(texts(loss))
    axis = re.findall(r"<img class='ring-axis' [^>]*src='data:image/svg\+xml;base64,([^']+)'", page)
    assert texts(ElementTree.fromstring(base64.b64decode(axis[0]))) == ["0", "0.5", "1", "1.5", "2", "step"]
    assert "samples/s per rank" in texts(rate)
    assert page.count("<tr>") == 3
    assert "[0-1]</span> epoch 1<" in page
    assert "digits &lt;1&gt;" in page
    assert "<1>" not in page


def test_no_widget_is_left_in_the_bundle(tmp_path: Path) -> None:
    assert set(report.mime_bundle(run(tmp_path / "r1", 1))) == {"text/html", "text/plain"}


def test_the_curve_is_drawn_where_the_numbers_are(tmp_path: Path) -> None:
    image = images(report.mime_bundle(run(tmp_path / "r1", 1))["text/html"])[0]
    lines = [one for one in image.iter("{http://www.w3.org/2000/svg}path") if one.get("fill") == "none"]
    assert len(lines) == 1
    corners = re.findall(r"[ML]([\d.]+) ([\d.]+)", lines[0].get("d", ""))
    heights = [float(y) for _, y in corners]
    assert len(corners) == 60
    assert heights == sorted(heights)  # the loss falls; on the page y grows downwards


def test_text_for_a_terminal(tmp_path: Path) -> None:
    lines = report.mime_bundle(run(tmp_path / "r1", 2))["text/plain"].splitlines()
    assert re.fullmatch(r"ok · digits <1> · 2 ranks · [\d.]+ s · 1,280 samples/s", lines[0])
    assert lines[1].split() == ["rank", "status", "step", "samples/s", "loss"]
    assert lines[2].split() == ["0", "ok", "59", "640", "0.01667"]
    assert lines[-1] == "[0-1] epoch 1"


def test_what_no_front_end_takes_is_replaced(tmp_path: Path) -> None:
    """In the locale C, Python has bytes of a folder's name as surrogates; a cell may print half a character."""
    log = run(tmp_path / "gr\udcc3\udcb6\udcc3\udc9fe", 2)
    shown = [report.mime_bundle(log), report.last_state(log), report.under_way(log)]
    shown.append(report.mime_bundle(run(tmp_path / "halves", 2, Output("halves", 0, "stdout", "\ud83d\n"))))
    for bundle in shown:
        "".join(bundle.values()).encode()
    assert "größe" in report.under_way(log)["text/plain"]


def test_many_ranks_are_a_band_and_a_short_text(tmp_path: Path) -> None:
    bundle = report.mime_bundle(run(tmp_path / "r1", 20))
    assert "mean of 20" in texts(images(bundle["text/html"])[0])
    assert bundle["text/html"].count("<tr>") == 21
    assert len(bundle["text/plain"].splitlines()) < 25


def test_a_failed_run_says_why_and_a_lost_rank_is_named(tmp_path: Path) -> None:
    ended = Ended("r1", 0, "failed", 1.0)
    log = run(tmp_path / "r1", 2, ended, status="failed", error="ValueError: <no>")
    bundle = report.mime_bundle(log)
    assert "● failed" in bundle["text/html"]
    assert "ValueError: &lt;no&gt;" in bundle["text/html"]
    assert "ValueError: <no>" in bundle["text/plain"]
    assert not any("ValueError" in shown for shown in report.mime_bundle(log, error=False).values())
    statuses = [line.split()[1] for line in bundle["text/plain"].splitlines() if re.match(r" *\d+ ", line)]
    assert statuses == ["failed", "lost"]


def test_a_set_up_cell_on_a_new_rank_alone_names_that_rank(tmp_path: Path) -> None:
    """The others take part in the run and do nothing."""
    log = run(tmp_path / "r1", 2, steps=0)
    for only, said in (([], "2 ranks"), ([1], "rank 1 of 2")):
        log.options["only"] = only
        assert f" {said} " in report.mime_bundle(log)["text/plain"].splitlines()[0]


def test_a_run_without_metrics_is_one_line_and_its_output(tmp_path: Path) -> None:
    bundle = report.mime_bundle(run(tmp_path / "r1", 2, steps=0))
    assert images(bundle["text/html"]) == []
    assert "<table" not in bundle["text/html"]
    assert len(bundle["text/plain"].splitlines()) == 2


def test_the_page_stays_small_in_a_long_run(tmp_path: Path) -> None:
    log = run(
        tmp_path / "r1",
        8,
        *[Output("r1", 0, "stdout", f"{n} {'x' * 80}\n") for n in range(3000)],
        steps=4000,
    )
    assert sum(map(len, report.mime_bundle(log).values())) < 250_000


def test_the_last_fifty_lines_are_visible_and_a_click_opens_the_rest(tmp_path: Path) -> None:
    said = "".join(f"line {n}\n" for n in range(80))
    page = report.mime_bundle(run(tmp_path / "r1", 1, Output("r1", 0, "stdout", said), steps=0))["text/html"]
    hidden, visible = re.search(r"<details><summary>31 earlier lines</summary>(.*?)</details>(.*)", page).groups()  # type: ignore[union-attr]
    assert ("line 29<" in hidden, "line 30<" in hidden, "line 29<" in visible) == (True, False, False)
    assert all(f"line {n}<" in visible for n in range(30, 80))
    assert "%ring runs output" not in hidden
    short = report.mime_bundle(run(tmp_path / "r2", 1, steps=0))["text/html"]
    assert "<details>" not in short
    assert "epoch 1<" in short


def test_lines_that_the_page_has_no_room_for_are_counted_and_written_to_a_file(
    tmp_path: Path, settings: Callable[..., None]
) -> None:
    pieces = [Output("r1", 0, "stdout", "".join(f"{'x' * 90} {40 * n + k}\n" for k in range(40))) for n in range(100)]
    log = run(tmp_path / "r1", 1, *pieces, steps=0)
    page = report.mime_bundle(log)["text/html"]
    assert "<summary>3,951 earlier lines</summary>" in page  # one more is that of `run`
    assert "<code>%ring runs output r1</code> writes all to a file" in page
    settings(runs_dir=tmp_path)
    assert catalogue.write_output("r1") == f"Wrote 4,001 lines to {tmp_path / 'r1' / 'output.txt'}."
    lines = (tmp_path / "r1" / "output.txt").read_text().splitlines()
    assert {f"[0] {'x' * 90} {number}" for number in (0, 3999)} < set(lines)
    assert len(lines) == 4001


def test_displays_are_in_the_page_or_outputs_of_their_own(tmp_path: Path) -> None:
    picture = {"image/png": "iVBO", "text/plain": "<Figure>"}
    table = {"text/html": "<table></table>", "text/plain": "a b"}
    shown = [Display("r1", 0, picture, {"image/png": {"width": 30}}), Display("r1", 0, table), Display("r1", 1, table)]
    log = run(tmp_path / "r1", 2, *shown)
    without = report.mime_bundle(log)
    assert "iVBO" not in without["text/html"]
    assert "<Figure>" not in without["text/plain"]
    bundle = report.mime_bundle(log, displays=True)
    assert (
        "[0]</span><div><img alt='&lt;Figure&gt;' width='30' src='data:image/png;base64,iVBO'>" in bundle["text/html"]
    )
    assert "[0-1]</span><div><table></table>" in bundle["text/html"]
    assert bundle["text/plain"].endswith("[0] <Figure>\n[0-1] a b\n")
    outputs = report.outputs(log)
    assert [data for data, _ in outputs[1::2]] == [picture, table]
    assert outputs[1][1] == {"image/png": {"width": 30}}
    assert [data["text/plain"] for data, _ in outputs[::2]] == ["[0]", "[0-1]"]


def test_what_is_printed_after_a_display_stands_below_it(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "r1", "r1", "", 2, "", {}, {})
    shown = {"text/html": "<b>figure</b>", "text/plain": "<Figure>"}
    for rank in (0, 1):  # one after the other, as they send it
        told = [
            Output("r1", rank, "stdout", "before\n"),
            Display("r1", rank, shown),
            Output("r1", rank, "stdout", "7\n"),
        ]
        log.put(encode(told))
    log.put(encode([Display("r1", 0, {"text/plain": "own", "text/html": "own"})]))
    log.put(encode([Output("r1", 1, "stdout", "last\n"), *(Ended("r1", rank, "ok", 3.0) for rank in (0, 1))]))
    log.finish("ok")
    whole = report.mime_bundle(log, displays=True)
    assert whole["text/plain"].split("\n", 1)[1] == "[0-1] before\n[0-1] <Figure>\n[0-1] 7\n[1] last\n[0] own\n"
    said = ("</span> before", "<b>figure</b>", "</span> 7", "</span> last", "<div>own")
    places = [whole["text/html"].index(text) for text in said]
    assert places == sorted(places)
    first = report.mime_bundle(log)["text/plain"]
    assert "before" in first
    assert "7" not in first.split("before")[1]
    following = [data["text/plain"] for data, _ in report.outputs(log)]
    assert following == ["[0-1]", "<Figure>", "[0-1] 7\n[1] last", "[0]", "own"]


def test_the_last_state_is_a_picture_that_says_what_to_do_and_text_that_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RunLog(tmp_path / "r1", "r1", "digits", 2, "", {}, {})
    rows = array("d", (value for step in range(9) for value in (log.started + step, step, 1 / (step + 1))))
    log.put(encode([MetricBatch("r1", rank, ("loss",), rows) for rank in (0, 1)]))
    until(lambda: log.taken == log.received)
    state = report.last_state(log)
    page = state["text/html"]
    assert page.count("%ring attach") == 1
    assert "last state seen" in page
    assert "● running" not in page
    assert "loss" in texts(images(page)[0])
    assert page.count("<tr>") == 3
    headline, header, *rows_of_ranks, notice = state["text/plain"].splitlines()
    assert "%ring attach" in notice
    assert headline.startswith("running · digits · 2 ranks")
    assert "loss" in header
    assert "lost" not in state["text/plain"]
    assert [row.split()[header.split().index("step")] for row in rows_of_ranks] == ["8", "8"]
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/my first.ipynb")
    waiting = report.last_state(log, waiting=True)
    assert "interrupt the kernel" in waiting["text/html"]
    for form in (page, waiting["text/html"], report.under_way(log)["text/html"]):
        ends = "cluster ends with its notebook's kernel, unless it was started with --keep"
        assert ends in html.unescape(form), "true also where the kernel, and with it the cluster, has ended"
    for form in waiting.values():
        assert "`%ring attach 'my first.ipynb'` in another notebook" in html.unescape(form)
        assert "was in progress" not in form, "the headline says so"
    assert waiting["text/plain"].splitlines()[-1] == (
        "`%ring attach 'my first.ipynb'` in another notebook shows and steers it while its cluster runs; its records "
        f"are in {tmp_path / 'r1'}; once it has ended, `%ring runs compare r1` shows them"
    ), "a terminal has no button, and no kernel that could be restarted"
    log.finish("ok")


def test_the_last_state_before_the_first_step_says_what_ranks_do(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "r1", "r1", "digits", 2, "import torch\nloss = train()", {}, {})
    now = time.time()
    log.put(encode([Status("r1", 0, now, line=1, extra={"importing": "torch"}), Status("r1", 1, now, line=2)]))
    until(lambda: log.taken == log.received)
    state = report.last_state(log)
    headline, *doing, notice = state["text/plain"].splitlines()
    assert headline.startswith("running · digits · 2 ranks")
    assert notice.startswith(
        "While its cluster runs, %ring attach shows it, here or in another notebook; a cluster ends with its notebook's"
        f" kernel, unless it was started with --keep; its records are in {tmp_path / 'r1'};"
    )
    assert [re.sub(r" \(.*", "", line) for line in doing] == [
        "importing torch on rank 0, line 1: import torch",
        "rank 1 at line 2: loss = train()",
    ]
    assert "rank 1 at line 2: loss = train()" in state["text/html"]
    log.finish("ok")


def test_of_many_displays_the_newest_stay_and_it_is_said_where_the_others_are(tmp_path: Path) -> None:
    log = run(tmp_path / "r1", 2, *(Display("r1", 0, {"text/html": f"number {i} " + 50_000 * "x"}) for i in range(100)))
    page = report.mime_bundle(log, displays=True)["text/html"]
    assert len(page) < 700_000
    assert "number 99 " in page
    assert "number 50 " not in page
    kept = len(log.view().displays)
    assert kept >= 10
    assert f"{100 - kept} earlier displays: see Run.displays, or {log.directory}" in page
    assert report.outputs(log)[0][0]["text/plain"].startswith(f"{100 - kept} earlier displays")
    assert len(log.displays()) == 100


def test_figure_of_chosen_metrics(tmp_path: Path) -> None:
    log = run(tmp_path / "r1", 2)
    assert "loss" in texts(images(report.figure([log], ["loss"]).data)[0])
    with pytest.raises(KeyError, match="no metric 'los'; it logged: loss"):
        report.figure([log], ["los"])


def test_runs_are_laid_over_one_another(tmp_path: Path) -> None:
    logs = [run(tmp_path / name, 2) for name in ("r1", "r2")]
    logs[1].name, logs[1].source = "", "lr = 0.2\n"
    loss, rate = images(Comparison(logs, {})._repr_html_())
    assert {"digits <1>", "lr = 0.2"} <= set(texts(loss))
    assert "samples/s per rank" in texts(rate)


def test_runs_in_a_legend_have_short_names_that_differ(tmp_path: Path) -> None:
    logs = [run(tmp_path / f"20261121-210706-{index}", 1, steps=2) for index in range(5)]
    for index, (log, name) in enumerate(zip(logs, ("a", "b", "b", "", ""), strict=True)):
        log.name, log.source = name, "lr = 0.2\n"
        log.started = time.mktime((2026, 11, 21, 21, 7, min(index, 3), 0, 0, -1))
    loss = images(Comparison(logs, {})._repr_html_())[0]
    unnamed = {f"lr = 0.2 21:07:03 #{index}" for index in (4, 5)}
    assert {"a", "b 21:07:01", "b 21:07:02"} | unnamed <= set(texts(loss))


def test_media_are_shown_with_name_and_step_and_hostile_text_is_text(tmp_path: Path) -> None:
    metrics.begin()
    metrics.log(step=7, image={"<i>": np.zeros((2, 3))}, text="<script>", histogram=np.arange(9.0))
    log = run(tmp_path / "r1", 2, *metrics.drain_shown("r1", 1))
    metrics.log(step=8, text={"text": "newer"})
    other = run(tmp_path / "r2", 2, *metrics.drain_shown("r2", 1))
    page = report.mime_bundle(log)["text/html"]
    assert "[1]</span> &lt;i&gt; · step 7" in page
    assert "<pre>&lt;script&gt;</pre>" in page
    assert "<script" not in page
    assert "<i>" not in page.replace("<i data-tip", "")
    assert "histogram of 9 values, mean 4, deviation 2.582" in page
    assert "width='126' height='84'" in page, "a small image is enlarged in whole pixels"
    assert [one.logged.name for one in log.media() if one.logged] == ["<i>", "text", "histogram"]
    assert log.displays() == []
    both = Comparison([log, other], {})._repr_html_()
    assert ("&lt;script&gt;" in both, "<pre>newer</pre>" in both) == (True, True)
    written = to_media(log)
    assert written == log.directory / "media"
    assert sorted(path.name for path in written.iterdir()) == [
        "_i_-step-7-rank-1.png",
        "histogram-step-7-rank-1.json",
        "text-step-7-rank-1.txt",
    ]


@pytest.mark.parametrize(("more", "others"), [(2, ""), (report.MOST_FOLDED, ""), (report.MOST_FOLDED + 1, "1 other:")])
def test_groups_have_names_and_what_is_left_out_opens_by_its_name(tmp_path: Path, more: int, others: str) -> None:
    names = ("loss", *(f"grad/{index}" for index in range(report.MOST_CHARTS - 1 + more)))
    rows = array("d", range(2 + len(names)))
    log = run(tmp_path, 1, MetricBatch(tmp_path.name, 0, names, rows))
    page = report.mime_bundle(log)["text/html"]
    assert "<b>grad</b><div class='ring-charts " in page
    assert f"<summary>{more} more metrics</summary>" in page
    assert "<details><summary>grad/11 14</summary><div class='ring-charts " in page
    assert ("others: <code>" in page or "other: <code>" in page) == bool(others)
    assert len(images(page)) == report.MOST_CHARTS + 1 + min(more, report.MOST_FOLDED), "and the samples/s"
    assert "more metrics</summary>" not in report.mime_bundle(log, ["loss"])["text/html"], "they were not chosen"


def test_a_metric_to_plot_that_was_not_logged_is_named(tmp_path: Path) -> None:
    bundle = report.mime_bundle(run(tmp_path / "r1", 1), ["los", "loss", "samples"])
    for shown in bundle.values():
        assert "--plot los: not logged; the run logged loss." in shown
    assert "the run logged no metrics." in report.mime_bundle(run(tmp_path / "r2", 1, steps=0), ["loss"])["text/plain"]


def test_a_speedup_is_said_when_it_was_measured(tmp_path: Path) -> None:
    log = run(tmp_path / "r1", 2)
    assert "one rank" not in report.mime_bundle(log)["text/plain"]
    log.options["one_rank"] = 675.0
    assert "1.9x one rank, measured by %%ringscale" in report.mime_bundle(log)["text/plain"]
    log.size = 1
    assert "one rank, measured" not in report.mime_bundle(log)["text/plain"], "its own rate again"
    log.summary["status"] = "failed"
    assert "one rank" not in report.mime_bundle(log)["text/plain"]


@pytest.mark.parametrize(
    ("left", "warning"),
    [(3600, ""), (200, "Slurm job 7 reaches its time limit in 3:20; save a checkpoint before")],
)
def test_the_time_limit_of_a_batch_job_is_told(tmp_path: Path, left: int, warning: str) -> None:
    ends = {"batch": {"job": "Slurm job 7", "end": 1000.0 + left + 0.4}}
    log = RunLog(tmp_path / "r1", "r1", "digits", 1, "", {}, ends, started=1000.0)
    try:
        view = replace(log.view(), elapsed=0.4)
        said = headline.text(headline.headline(log, view))
        assert f"{duration(left)} until the time limit of Slurm job 7" in said
        assert said.partition("\n")[2] == warning
    finally:
        log.finish("ok")
    assert "time limit" not in headline.text(headline.headline(log, log.view()))


def test_a_run_without_a_name_is_called_by_its_cell(tmp_path: Path) -> None:
    log = run(tmp_path / "r1", 1)
    log.name, log.source = "", "# Set up\nimport torch\nmodel = Net()"
    assert " · Set up · " in report.mime_bundle(log)["text/plain"]
    assert first_line("import torch\nfrom x import y\n\nmodel = Net()") == "model = Net()"
    assert first_line("import torch\n") == "import torch"
    assert len(first_line("x = " + "1 + " * 50)) == 48
    assert first_line("\n%%time\n") == ""


def test_a_rank_that_died_is_marked_and_the_others_are_stopped(tmp_path: Path) -> None:
    ends = (Ended("r1", 0, "aborted", 1.0), Ended("r1", 1, "died", 1.0), Ended("r1", 2, "failed", 1.0))
    for steps, shown in ((0, ["0", "?", "0"]), (3, ["2", "≥2", "2"])):  # rows of the last half second were not sent
        bundle = report.mime_bundle(run(tmp_path / f"r{steps}", 3, *ends, steps=steps))
        rows = [line.split()[:3] for line in bundle["text/plain"].splitlines() if line.lstrip()[:1].isdigit()]
        assert [row[1] for row in rows] == ["stopped", "died", "failed"]
        assert [row[2] for row in rows] == shown
    assert "<td style='color:#d97706'>stopped</td>" in bundle["text/html"]
    assert "<td style='color:#ef4444'>died</td>" in bundle["text/html"]


def test_values_under_the_mouse_end_where_a_run_ends(tmp_path: Path) -> None:
    long, short = (run(tmp_path / name, 1, steps=steps) for name, steps in (("long", 100), ("short", 50)))
    page = report.figure([long, short], ["loss"]).data
    tips = [tip.split("&#10;") for tip in re.findall(r"<i data-tip='([^']*)'></i>", page)]
    both = [int(tip[0].split()[1]) for tip in tips if len(tip) == 3]
    one = [int(tip[0].split()[1]) for tip in tips if len(tip) == 2]
    assert len(both) + len(one) == len(tips)
    assert max(both) <= 50 <= min(one)


@pytest.mark.parametrize("told", [True, False])
def test_where_the_time_of_a_killed_rank_went_is_what_it_had_told(tmp_path: Path, told: bool) -> None:
    facts = {"training": 4.0, "communication": 3.0, "waiting": 3.0, "on_cpu": 1.0}
    log = run(
        tmp_path / "r1",
        2,
        *(Status("r1", rank, time.time(), extra=facts if told or rank == 0 else {}) for rank in range(2)),
        Ended("r1", 0, "aborted", 5.0, facts),
        Ended("r1", 1, "died", 5.0),
    )
    assert log.view().slow is None, "a rank that has told nothing is not one that computes"
    assert log.view().ranks[1].spent.share(1.0) == (0.25 if told else 0)


def test_a_value_that_is_no_number_is_said_first_and_drawn_in_red(tmp_path: Path) -> None:
    bad = MetricBatch("r1", 1, ("loss",), array("d", (time.time(), 60, float("nan"), time.time(), 61, float("inf"))))
    bundle = report.mime_bundle(run(tmp_path / "r1", 2, bad))
    assert bundle["text/plain"].splitlines()[1] == "loss is NaN on rank 1 since step 60"
    assert "NaN, rank 1" in texts(images(bundle["text/html"])[0])
    assert "<td class='ring-fold-0' style='color:#ef4444'>inf</td>" in bundle["text/html"]


def test_a_value_that_was_no_number_for_a_while_is_said_so(tmp_path: Path) -> None:
    bad = MetricBatch("r1", 1, ("loss",), array("d", (time.time(), 60, float("nan"), time.time(), 61, 0.5)))
    bundle = report.mime_bundle(run(tmp_path / "r1", 2, bad))
    assert bundle["text/plain"].splitlines()[1] == "loss was NaN on rank 1 at step 60, and has numbers again"


def test_values_are_there_to_hover_over_and_unseen_without_styles(tmp_path: Path) -> None:
    page = report.mime_bundle(run(tmp_path / "r1", 2))["text/html"]
    tips = re.findall(r"<i data-tip='([^']*)'></i>", page)
    assert any(tip.startswith("step ") and "&#10;rank 0  " in tip and "&#10;rank 1  " in tip for tip in tips)


@pytest.mark.parametrize(("steps", "seconds", "shown"), [(60, 1, True), (0, 1, False), (0, 30, True)])
def test_a_short_cell_without_metrics_leaves_out_the_machines(
    tmp_path: Path, steps: int, seconds: float, shown: bool
) -> None:
    now = time.time()
    log = run(tmp_path / "r1", 1, *(Load("r1", 0, now + at, {"cpu": 50.0}) for at in range(3)), steps=steps)
    log.summary["seconds"] = seconds
    page = report.mime_bundle(log)["text/html"]
    assert ("<summary>Machine</summary>" in page) == shown
    assert shown or len(page) < 10_000


@pytest.mark.parametrize(
    ("ways", "said"),
    [(("", "nccl"), "GPU tensors by NCCL"), (("nccl", "host"), "GPU tensors through CPU memory"), (("", ""), "")],
)
def test_how_tensors_on_gpus_go_between_the_ranks(tmp_path: Path, ways: tuple[str, str], said: str) -> None:
    now = time.time()
    log = run(tmp_path / "r1", 2, *(Status("r1", rank, now, extra={"transport": way}) for rank, way in enumerate(ways)))
    first = headline.text(headline.headline(log, log.view())).splitlines()[0]
    assert [fact for fact in first.split(" · ") if fact.startswith("GPU")] == [said] * bool(said)


def test_the_epoch_of_a_run_in_progress_is_said_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "r1", "r1", "", 2, "", {}, {})
    for rank, epoch in ((0, 4.0), (1, 3.0)):
        log.put(encode([MetricBatch("r1", rank, ("loss", "epoch"), array("d", (log.started, 9, 0.5, epoch)))]))
    until(lambda: log.taken == log.received)
    view = log.view()
    assert "epoch 3" in headline.text(headline.headline(log, view))
    assert "epoch" not in rank_table.table(view).columns
    log.finish("ok")
    assert "epoch" not in headline.text(headline.headline(log, log.view()))


def spent(waits: dict[int, float], seconds: float, data: dict[int, float] | None = None) -> list[Ended]:
    facts = {rank: {"communication": wait * 1.2, "waiting": wait, "training": seconds} for rank, wait in waits.items()}
    for rank, loading in (data or {}).items():
        facts[rank]["data_wait"] = loading
    return [Ended("r1", rank, "ok", seconds + 5, fact) for rank, fact in facts.items()]


def test_the_slow_rank_is_the_one_that_hardly_waits(tmp_path: Path) -> None:
    log = run(tmp_path / "r1", 3, *spent({0: 3.0, 1: 0.1, 2: 3.0}, 10.0))
    content = rank_table.table(log.view(), still=True)
    assert content.stragglers == {1}
    column = content.columns.index("waiting")
    assert [row[column] for row in content.rows] == ["30%", "1%", "30%"]
    said = report.mime_bundle(log)["text/plain"].splitlines()[1]
    assert said.startswith("rank 1 is 1.5x slower outside of collectives; the others wait 30%. ")


def test_the_bubble_of_a_stage_is_told_from_waits_in_collectives(tmp_path: Path) -> None:
    idle = [
        Ended("r1", rank, "ok", 12.0, {"communication": 4.0, "waiting": 3.0, "bubble": 2.0 - rank, "training": 10.0})
        for rank in range(2)
    ]
    log = run(tmp_path / "r1", 2, *idle)
    content = rank_table.table(log.view(), still=True)
    shares = {name: [row[content.columns.index(name)] for row in content.rows] for name in ("waiting", "bubble")}
    assert shares == {"waiting": ["10%", "20%"], "bubble": ["20%", "10%"]}
    page = rank_table.html(content)
    assert "idle until a message comes: 20%" in page
    assert "<span>bubble</span>" in page
    data_parallel = run(tmp_path / "r2", 2, *spent({0: 3.0, 1: 3.0}, 10.0))
    assert "bubble" not in rank_table.html(rank_table.table(data_parallel.view(), still=True))


def test_the_slow_rank_may_wait_for_its_data(tmp_path: Path) -> None:
    log = run(tmp_path / "r1", 2, *spent({0: 4.0, 1: 0.0}, 10.0, {1: 5.0}))
    assert "rank 1 is 1.9x slower in getting data; the others wait 40%" in report.mime_bundle(log)["text/plain"]


@pytest.mark.parametrize(
    ("waits", "seconds", "steps"),
    [({0: 1.0, 1: 0.1}, 3.0, 60), ({0: 3.0, 1: 0.1}, 10.0, 10), ({0: 0.8, 1: 0.1}, 10.0, 60), ({0: 3, 1: 3}, 10, 60)],
    ids=["short", "few-steps", "little", "both"],
)
def test_nobody_is_slow_from_noise(tmp_path: Path, waits: dict[int, float], seconds: float, steps: int) -> None:
    view = run(tmp_path / "r1", 2, *spent(waits, seconds), steps=steps).view()
    assert rank_table.table(view, still=True).stragglers == set()


def test_many_ranks_begin_with_the_slow_ones(tmp_path: Path) -> None:
    waits = {rank: 0.1 if rank == 30 else 3.0 for rank in range(40)}
    content = rank_table.table(run(tmp_path / "r1", 40, *spent(waits, 10.0)).view(), still=True)
    assert [row[0] for row in content.rows[:3]] == ["30", "0", "1"]


def test_stuck_names_who_is_missing_and_where_each_rank_is(tmp_path: Path) -> None:
    source = "for step in steps:\n    train()\n\nring.allreduce(x)"
    log = RunLog(tmp_path / "r1", "r1", "", 3, source, {"first_line": 2}, {})
    waiting = {"operation": "allreduce", "name": "late", "sequence": 102, "seconds": 12.0, "missing": [1]}
    extra = {"calls": 101}
    log.put(encode([Status("r1", rank, 0.0, line=5, waiting=waiting, extra=extra) for rank in (0, 2)]))
    log.put(encode([Status("r1", 1, 0.0, line=3, extra={"calls": 100}, progress=(5, 10))]))
    until(lambda: len(log.statuses()) == 3)
    ranks = log.view().stuck(after=1e-9)
    content = headline.headline(log, log.view(), ranks)
    assert content.status == "stuck"
    assert content.left is None
    assert re.sub(r"[\d.]+ s:", "N s:", content.alarms[0]) == (
        "stuck for N s: ranks 0, 2 wait for rank 1 in allreduce 'late'; rank 1 is at line 3: train(). "
        "101 calls on rank 0, 100 on rank 1; the last differs at line 5"
    )
    page = waits.stall_html(ranks, log.code_at)
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in page.split("<tr>")[2:]]
    assert cells[0] == ["0, 2", "allreduce late", "101", "12 s", "5: ring.allreduce(x)", "1"]
    assert [cells[1][index] for index in (0, 1, 2, 4)] == ["1", "code outside of collectives", "100", "3: train()"]
    assert log.view().stuck(after=0) == ()
    log.finish("interrupted")
    assert waits.stall_html(()) == ""


def test_how_numbers_are_said() -> None:
    assert [duration(value) for value in (0.04, 12, 185, 7385)] == ["0.0 s", "12 s", "3:05", "2:03:05"]
    assert duration(float("inf")) == "?"
    assert [ago(value) for value in (0.3, 5)] == ["now", "5.0 s ago"]
    assert [whole(value) for value in (1234567, 99.5, 0.25)] == ["1,234,567", "99.5", "0.25"]
    assert rank_list([7, 0, 2, 1]) == "0-2, 7"


def test_energy_is_told_or_why_not(tmp_path: Path, settings: Callable[..., None]) -> None:
    facts = {"joules_packages": 3840.0, "samples": 1920.0, "training": 3.0}
    status = Status("r1", 0, 1.0, progress=(30, 60), extra={"pass": 3})
    measured = run(
        tmp_path / "r1", 2, status, Ended("r1", 0, "ok", 3.0, facts), Ended("r1", 1, "ok", 3.0, {"samples": 1920.0})
    )
    assert "3.84 kJ, 1 J a sample, 1.54 kJ an epoch" in report.mime_bundle(measured)["text/plain"]
    assert measured.summary["energy"] == {"joules": 3840.0, "per_sample": 1.0, "per_epoch": 1536.0, "lacks": ""}
    lacks = {"energy_lacks": "only root may read energy_uj"}
    load = [Load("r2", 0, time.time() + at, {"cpu": 50.0}) for at in (0, 1)]
    page = report.mime_bundle(run(tmp_path / "r2", 1, *load, Ended("r2", 0, "ok", 3.0, lacks)))["text/html"]
    assert page.count("energy not measured: only root may read energy_uj") == 1
    settings(runs_dir=tmp_path)
    listed = catalogue.listing(every=True)
    assert [row[listed.columns.index("J/sample")] for row in listed.rows] == ["", "1"]


@pytest.mark.parametrize("page", ["#ffffff", "#111111"])
def test_words_in_color_are_readable_on_light_and_dark_pages(page: str) -> None:
    """The contrast that WCAG 2 asks of large or bold text and of parts of a page: 3 to 1."""

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for word, color in {**STATUS_COLORS, "faint": GREY, "red": RED}.items():
        one, other = sorted((luminance(color), luminance(page)))
        assert (other + 0.05) / (one + 0.05) >= 3, word
