"""The panel at sizes that this machine has no cores for: simulated ranks, to see that it stays readable."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from browser.lab import Lab, NotebookPage

RANKS = (1, 4, 16, 128)
# What ranks of a run would have sent: three hundred steps, every seventh rank a little slower than the others.
SIMULATED = """
import math, sys
from array import array
from pathlib import Path
from ring_notebook.notebook.panel.panel import Panel
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.records import MetricBatch, Output, Status, encode

log = RunLog(Path("simulated-{size}"), "simulated-{size}", "{size} ranks", {size}, "", {{}}, {{}})
log.started = log._state.started = log.started - 30
for rank in range({size}):
    rows = array("d")
    for step in range(300):
        loss = 2.3 * math.exp(-step / 80) + 0.02 * math.sin(step * 0.3 + rank)
        rows.extend((log.started + step / 10, step, loss, 1 - loss / 2.4, 64.0))
    extra = {{"communication": 9.0 if rank % 7 != 3 else 1.0, "data_wait": 1.5}}
    log.put(encode([
        MetricBatch(log.run, rank, ("loss", "accuracy", "samples"), rows),
        Output(log.run, rank, "stdout", "epoch 1 done\\n"),
        Status(log.run, rank, log.started + 30, line=4, progress=(300, 1000), extra=extra),
    ]))
Panel(log, stop=lambda: None).show()
"""


@pytest.fixture(scope="module", params=["Light", "Dark"])
def themed_lab(
    chromium: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Lab]:
    """A server with this theme."""
    lab = Lab(tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("lab"), theme=f"JupyterLab {request.param}")
    yield lab
    lab.close()


@pytest.fixture
def lab(themed_lab: Lab) -> Lab:
    return themed_lab


def test_readable_at_any_size(
    lab: Lab,
    open_notebook: Callable[[str], NotebookPage],
    picture: Callable[[NotebookPage, int, str], None],
    request: pytest.FixtureRequest,
) -> None:
    dark = "Dark" in request.node.name
    sizes = (4,) if dark else RANKS
    NotebookPage.write(lab.directory / "sizes.ipynb", *(SIMULATED.format(size=size) for size in sizes))
    notebook = open_notebook("sizes.ipynb")
    assert notebook.page.locator("body").get_attribute("data-jp-theme-light") == ("false" if dark else "true")
    for cell, size in enumerate(sizes):
        notebook.run(cell)
        notebook.wait_ended(cell)
        panel = notebook.output(cell).locator(".ring-panel")
        rows = panel.locator(".ring-table tbody tr")
        notebook.until(lambda rows=rows, size=size: rows.count() == size)  # type: ignore[misc]
        notebook.until(lambda panel=panel: panel.locator(".bqplot path.line").count() >= 3)  # type: ignore[misc]
        box = notebook.output(cell).bounding_box()
        assert box is not None
        # No part of it is wider than the cell, and the panel of many ranks is no higher than that of a few.
        assert panel.evaluate("element => element.scrollWidth <= element.clientWidth")
        assert box["height"] < 750
        # The slow ones are marked, as there is somebody to compare with.
        assert panel.locator("text=slow").count() == sum(rank % 7 == 3 for rank in range(size)) * (size > 1)
        picture(notebook, cell, f"size-{size}{'-dark' if dark else ''}")
    # Reachable without a mouse: the button takes the focus and the keyboard presses it.
    button = notebook.output(0).get_by_role("button", name="Stop")
    button.focus()
    notebook.page.keyboard.press("Enter")
    notebook.output(0).get_by_role("button", name="Stopping").wait_for(timeout=60_000)
