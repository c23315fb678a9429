"""The panel before there is anything to show: what will come has its place, so that nothing jumps."""

from __future__ import annotations

import re
from array import array
from pathlib import Path

import pytest

from harness.waiting import until
from ring_notebook.notebook.panel.panel import CHUNK, CHUNKS, Panel
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.record.tags_and_look import Look
from ring_notebook.protocol.records import MetricBatch, Output, Status, encode


@pytest.mark.parametrize(
    ("source", "plot", "expected"),
    [
        ("for batch in ring.track(loader):\n    step(batch)", (), ["samples/s per rank"]),
        ("for step in ring.track(range(9)):\n    ring.log(loss=1, val_loss=2, epoch=3, step=4)", (), ["loss"]),
        ("hvd.log(loss=math.log(2), samples=8)", (), ["loss", "samples/s per rank"]),
        ("hvd.log(**found)", (), [""]),
        ("train()", ("loss",), ["loss"]),
        ("ring.log(a=1, b=2, samples=3)", ("b",), ["b", "samples/s per rank"]),
        ("print(ring.rank())", (), []),
        ("logging = catalog(3)", (), []),
    ],
)
def test_axes_of_what_will_come(tmp_path: Path, source: str, plot: tuple[str, ...], expected: list[str]) -> None:
    log = RunLog(tmp_path, "run", "name", 2, source, {}, {})
    panel = Panel(log, plot=plot)
    panel._draw_text(log.view())
    assert re.findall("<img alt='([^']*) over [a-z]+: no values yet'", panel._axes.value) == expected
    assert panel._axes.layout.display is None
    assert "the cell is on its way" in panel._beginning.value
    log.finish("ok")


def test_a_package_that_all_ranks_import_is_named(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", "run", "", 2, "import torch\ntrain()", {}, {})
    panel = Panel(log)
    for line, said in (
        (0, "importing torch on 2 ranks (0."),
        (1, "importing torch on 2 ranks, line 1: import torch (0."),
    ):
        facts = {"importing": "torch"}
        log.put(encode([Status("run", rank, 0.0, line=line, extra=facts) for rank in (0, 1)]))
        until(lambda: log.taken == log.received)
        panel._draw_text(log.view())
        assert said in panel._beginning.value
    log.put(encode([Status("run", 0, 0.0, line=2)]))
    until(lambda: log.taken == log.received)
    panel._draw_text(log.view())
    assert "importing torch on rank 1, line 1" in panel._beginning.value
    assert "rank 0 at line 2: train()" in panel._beginning.value
    log.finish("ok")


def test_what_a_rank_does_is_shown_until_the_first_step(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", "run", "", 2, "import torch\ntrain()", {"first_line": 2}, {})
    log.put(encode([Status("run", 0, 0.0, line=2), Status("run", 1, 0.0, line=3)]))
    until(lambda: log.taken == 1)
    panel = Panel(log)
    panel._draw_text(log.view())
    assert "rank 0 at line 2: import torch" in panel._beginning.value
    assert "rank 1 at line 3: train()" in panel._beginning.value
    log.put(encode([MetricBatch("run", 0, ("loss",), array("d", (log.started, 0, 0.5)))]))
    until(lambda: log.taken == 2)
    panel._draw_text(log.view())
    assert panel._beginning.layout.display == "none"
    assert panel._axes.layout.display is None, "until the page has drawn a chart"
    assert panel._table.value.count("<tr>") == 3
    log.finish("ok")


def test_a_live_page_keeps_the_last_of_very_many_lines(tmp_path: Path) -> None:
    """A page with tens of thousands of them stalls for so long that its server ends the connection."""
    log = RunLog(tmp_path, "run", "name", 1, "", {}, {})
    panel = Panel(log)
    for batch in range(8):
        lines = "".join(f"line {number}\n" for number in range(2000 * batch, 2000 * (batch + 1)))
        log.put(encode([Output("run", 0, "stdout", lines)]))
        until(lambda: log.taken == log.received)
        panel._output.add(log.view())
    newest, *others = (one.value for one in panel._output.widget.children[1:])
    assert newest.endswith("line 15999</div>")
    assert len(newest) + sum(map(len, others)) <= CHUNK * CHUNKS
    log.finish("ok")


def test_a_page_that_was_opened_later_says_why_the_run_has_ended(tmp_path: Path) -> None:
    """The cell shows that itself, but to the page that has started it, and no other."""
    log = RunLog(tmp_path / "run", "run", "", 2, "train()", {}, {})
    panel = Panel(log, apart=True)
    panel._redraw.start()
    log.finish("failed", "ValueError: x", "ValueError: x")
    panel.close()
    assert "ValueError: x" in panel._box.children[0].value


def test_a_click_is_kept_with_the_run(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", "run", "", 2, "train()", {}, {})
    panel = Panel(log)
    panel._charts._log.value = True
    panel._charts._rank_clicked(1)
    panel._charts._smooth.value = 0.8
    panel._charts._search.value = "los "
    panel._charts._group_clicked("grad")
    log.finish("ok")
    kept = Look(log=True, smooth=0.8, ranks=frozenset({1}), search="los", groups=frozenset({"grad"}))
    assert RunRecord.load(log.directory).look == kept
    (log.directory / "look.json").write_text('{"smooth": true}')
    assert RunRecord.load(log.directory).look == Look(smooth=0.9), "as an earlier version has kept it"
    (log.directory / "look.json").write_text("[]")
    assert RunRecord.load(log.directory).look == Look()


def test_groups_and_a_search_choose_the_charts(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", "run", "", 1, "train()", {}, {})
    names = ("loss", *(f"grad/{index}" for index in range(15)))
    log.put(encode([MetricBatch("run", 0, names, array("d", (log.started, *range(17))))]))
    until(lambda: log.taken == 1)
    area = Panel(log)._charts

    def shown() -> list[str]:
        area._due = 0.0
        area.draw(log.view())
        return [*area._charts]

    assert shown() == ["loss", "grad/0", "grad/1", "grad/2", "grad/3", "grad/4"]
    area._groups["grad"]._button.click()
    assert len(shown()) == 16
    assert area._groups["grad"]._button.description == "fewer"
    area._search.value = "1 grad"
    assert sorted(shown()) == ["grad/1", "grad/10", "grad/11", "grad/12", "grad/13", "grad/14"]
    area._search.value = "what"
    assert shown() == []
    assert area._none.layout.display is None
    area._search.value = ""
    assert len(shown()) == 12, "the others are added a moment later, so that the page stays awake"
    assert len(shown()) == 16
    log.finish("ok")
