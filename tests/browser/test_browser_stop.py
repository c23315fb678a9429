"""The panel in trouble: Stop while the cell blocks, and the view of who is stuck where."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator, expect

from browser.lab import NotebookPage, Open, Picture

START = "%load_ext ring_notebook\n%ring start -n 2"
LONG = """%%ringtrain --name long
import time
for step in range(100_000):
    ring.log(loss=1 / (step + 1), samples=1)
    time.sleep(0.01)
"""
STUCK = """%%ringtrain --name stuck
import time, torch
ring.allreduce(torch.ones(3), name="warm")
if ring.rank() == 1:
    time.sleep(1000)
ring.allreduce(torch.ones(3), name="late")
"""
STEERED = """%%ringtrain --name steered --plot loss
import time, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
model, optimizer = ring.prepare(model, optimizer)
noise, turns = ring.knob("noise", 0.5, low=0, high=1), ring.knob("turns", 3, low=1, high=9)
mode, augment = ring.knob("mode", "plain", choices=["plain", "mixed"]), ring.knob("augment", False)
for step in range(100_000):
    x = torch.randn(32, 8)
    loss = ((model(x) - x.sum(1, keepdim=True) - noise * torch.randn(32, 1)) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    ring.log(loss=loss, samples=32)
    time.sleep(0.02)
"""
AFTER = """%%ringtrain
import torch
print("sum", ring.allreduce(torch.ones(1), op=ring.Sum).item())
"""


@pytest.fixture(scope="module")
def notebook(open_shared: Open) -> NotebookPage:
    """A notebook with a cluster of 2, the cells to be stopped, and one that must still work."""
    notebook = open_shared("stop.ipynb", START, AFTER, LONG, STUCK, LONG, STEERED)
    notebook.complete(0)
    return notebook


def start(notebook: NotebookPage, cell: int) -> Locator:
    """Run a cell; returns all that it shows once its panel is there."""
    notebook.run(cell)
    notebook.output(cell).locator(".ring-panel").wait_for()
    return notebook.output(cell)


def stop(notebook: NotebookPage, cell: int) -> None:
    """Press Stop while the cell blocks: it ends as interrupted."""
    notebook.output(cell).get_by_role("button", name="Stop").click()
    notebook.wait_ended(cell)
    expect(notebook.output(cell).locator(".ring-report")).to_contain_text("interrupted", use_inner_text=True)
    expect(notebook.output(cell)).to_contain_text("KeyboardInterrupt", use_inner_text=True)


def stop_with_the_keyboard(notebook: NotebookPage, cell: int) -> None:
    """Go to Stop with Tab alone and press it with Enter."""
    page = notebook.page
    notebook.cell(cell).locator(".jp-InputArea-prompt").click()
    for _ in range(60):
        page.keyboard.press("Tab")
        if "Stop" in page.evaluate("document.activeElement.innerText || ''")[:20]:
            break
    else:
        raise AssertionError("Tab does not come to Stop")
    page.keyboard.press("Enter")
    notebook.wait_ended(cell)
    expect(notebook.output(cell)).to_contain_text("KeyboardInterrupt", use_inner_text=True)


def go_on(notebook: NotebookPage) -> None:
    """The next cell works."""
    notebook.complete(1)
    expect(notebook.output(1)).to_contain_text("sum 2", use_inner_text=True)


def test_stop_ends_every_rank_of_a_long_run(notebook: NotebookPage) -> None:
    rows = start(notebook, 2).locator(":is(.ring-panel, .ring-report) .ring-table:has(th:text-is('loss')) tbody tr")
    notebook.until(lambda: rows.count() == 2)
    stop(notebook, 2)
    assert [row.locator("td").nth(1).inner_text() for row in rows.all()] == ["interrupted", "interrupted"]
    go_on(notebook)


@pytest.mark.slow
def test_the_panel_says_who_waits_for_whom(notebook: NotebookPage, picture: Picture) -> None:
    output = start(notebook, 3)
    notice = output.locator(".ring-stuck")
    notice.wait_for()
    picture(notebook, 3, "stuck")
    cells = notice.locator("tbody tr").first.locator("td").all_inner_texts()
    assert cells[1] == "allreduce late"
    assert cells[4].startswith("6: ring.allreduce")
    assert cells[5] == "1"
    alarm = output.locator(".ring-panel .ring-alarm").first
    assert "rank 0 waits for rank 1 in allreduce 'late'" in alarm.inner_text()
    stop(notebook, 3)
    go_on(notebook)


@pytest.mark.slow
def test_stop_is_reached_without_a_mouse(notebook: NotebookPage) -> None:
    start(notebook, 4)
    stop_with_the_keyboard(notebook, 4)
    go_on(notebook)


@pytest.mark.slow
def test_sliders_change_a_run_while_its_cell_blocks(notebook: NotebookPage, picture: Picture) -> None:
    panel = start(notebook, 5).locator(".ring-panel").first
    knobs = panel.locator(".ring-knobs")
    expect(knobs).to_contain_text("augment", use_inner_text=True)
    knobs.locator(".widget-hslider", has_text="lr").locator(".noUi-handle").press("ArrowLeft")
    readout = knobs.locator(".widget-hslider", has_text="noise").locator(".widget-readout")
    readout.fill("0.25")
    readout.press("Enter")
    knobs.locator("select").select_option("mixed")
    knobs.get_by_label("augment").check()
    panel.get_by_role("button", name="Pause").click()
    expect(panel.locator(".ring-status")).to_have_text("● paused")
    for width in (1400, 700):
        notebook.size(width)
        assert panel.evaluate("shown => shown.scrollWidth <= shown.clientWidth")
        picture(notebook, 5, f"steering-{width}")
    panel.get_by_role("button", name="Resume").click()
    expect(panel.locator(".ring-status")).to_have_text("● running")
    stop(notebook, 5)
    report = notebook.output(5).locator(".ring-report").first
    for change in ("noise = 0.25", "mode = mixed", "augment = True", "pause", "resume"):
        expect(report).to_contain_text(change, use_inner_text=True)
    picture(notebook, 5, "steering-report")
    go_on(notebook)
