"""The panel before there is anything to show: what will come has its place, so that nothing jumps."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from ring_notebook.notebook.panel.panel import Panel
from ring_notebook.notebook.record.choices import Look
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.records import MetricBatch, Status, encode


@pytest.mark.parametrize(
    ("source", "plot", "expected"),
    [
        ("for batch in ring.track(loader):\n    step(batch)", (), True),
        ("hvd.log(loss=loss)", (), True),
        ("train()", ("loss",), True),
        ("print(ring.rank())", (), False),
        ("logging = catalog(3)", (), False),
    ],
)
def test_room_for_what_will_come(tmp_path: Path, source: str, plot: tuple[str, ...], expected: bool) -> None:
    log = RunLog(tmp_path, "run", "name", 2, source, {}, {})
    panel = Panel(log, plot=plot)
    panel._draw_text(log.view())
    assert (panel._beginning.layout.min_height == "300px") is expected
    assert "the cell is on its way" in panel._beginning.value
    log.finish("ok")


def test_what_a_rank_does_is_shown_until_the_first_step(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", "run", "", 2, "import torch\ntrain()", {"first_line": 2}, {})
    log.put(encode([Status("run", 0, 0.0, line=2), Status("run", 1, 0.0, line=3)]))
    wait_until(lambda: log.taken == 1)
    panel = Panel(log)
    panel._draw_text(log.view())
    assert "rank 0 at line 2: import torch" in panel._beginning.value
    assert "rank 1 at line 3: train()" in panel._beginning.value
    log.put(encode([MetricBatch("run", 0, ("loss",), array("d", (log.started, 0, 0.5)))]))
    wait_until(lambda: log.taken == 2)
    panel._draw_text(log.view())
    assert panel._beginning.layout.display == "none"
    assert panel._table.value.count("<tr>") == 3
    log.finish("ok")


def test_a_click_is_kept_with_the_run(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", "run", "", 2, "train()", {}, {})
    panel = Panel(log)
    panel._charts._log.value = True
    panel._charts._rank_clicked(1)
    log.finish("ok")
    assert RunRecord.load(log.directory).look == Look(log=True, ranks=frozenset({1}))
    (log.directory / "look.json").write_text("[]")
    assert RunRecord.load(log.directory).look == Look()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)
