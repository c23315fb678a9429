"""The panel in trouble: Stop while the cell blocks, and the view of who is stuck where."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, expect

from browser.lab import Lab, NotebookPage

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
AFTER = """%%ringtrain
import torch
print("sum", ring.allreduce(torch.ones(1), op=ring.Sum).item())
"""


@pytest.fixture(scope="module")
def notebook(lab: Lab, open_shared: Callable[[str], NotebookPage]) -> NotebookPage:
    """A notebook with a cluster of 2, the cells to be stopped, and one that must still work."""
    NotebookPage.write(lab.directory / "stop.ipynb", START, AFTER, LONG, STUCK, LONG)
    notebook = open_shared("stop.ipynb")
    notebook.run(0)
    notebook.wait_ended(0)
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
    notebook.run(1)
    notebook.wait_ended(1)
    expect(notebook.output(1)).to_contain_text("sum 2", use_inner_text=True)


def test_stop_ends_every_rank_of_a_long_run(notebook: NotebookPage) -> None:
    rows = start(notebook, 2).locator(":is(.ring-panel, .ring-report) .ring-table:has(th:text-is('loss')) tbody tr")
    notebook.until(lambda: rows.count() == 2)
    stop(notebook, 2)
    assert [row.locator("td").nth(1).inner_text() for row in rows.all()] == ["interrupted", "interrupted"]
    go_on(notebook)


def test_the_panel_says_who_waits_for_whom(
    notebook: NotebookPage, picture: Callable[[NotebookPage, int, str], None]
) -> None:
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


def test_stop_is_reached_without_a_mouse(notebook: NotebookPage) -> None:
    start(notebook, 4)
    stop_with_the_keyboard(notebook, 4)
    go_on(notebook)
