"""The panel before there is anything to show: what will come has its place, so that nothing jumps."""

from __future__ import annotations

from pathlib import Path

import pytest

from ring_notebook.notebook.panel.panel import Panel
from ring_notebook.notebook.record.run_log import RunLog


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
def test_room_for_charts_and_table(tmp_path: Path, source: str, plot: tuple[str, ...], expected: bool) -> None:
    log = RunLog(tmp_path, "run", "name", 2, source, {}, {})
    panel = Panel(log, plot=plot)
    panel._draw_text(log.view())
    assert (panel._chart_row.layout.min_height == "237px") is expected
    assert panel._table.value.count("<tr>") == (3 if expected else 0)
    log.finish("ok")
