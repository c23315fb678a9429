"""What ranks display, in a browser: live below the panel, in the saved notebook, and in a page opened later."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from browser.lab import Open, Picture

START = "%load_ext ring_notebook\n%ring start -n 2"
DRAWS = """%%ringtrain --name drawn
import time, matplotlib.pyplot as plt
from IPython.display import HTML, display
display(HTML("<h4>the same on all ranks</h4>"))
figure, axes = plt.subplots(figsize=(4, 2))
(line,) = axes.plot([0, 1, ring.rank()])
shown = display(figure, display_id=True)
plt.close(figure)
for step in range(100_000):
    line.set_ydata([0, 1, step % 10 / 10 + ring.rank()])
    shown.update(figure)
    ring.log(loss=1 / (step + 1), samples=1)
    time.sleep(0.2)
"""
# Keeps how many columns of charts the page has shown, and how wide, in 100 pixels; axes without values are charts.
COLUMNS = """() => {
    window.columns = [];
    const look = () => {
        const shown = [...document.querySelectorAll(".ring-panel :is(.ring-chart, canvas)")]
            .map(one => one.getBoundingClientRect()).filter(box => box.width);
        const count = new Set(shown.map(box => Math.round(box.left / 100))).size;
        const now = `${count} of ${Math.round(Math.max(...shown.map(box => box.width)) / 100)}`;
        if (document.querySelector(".ring-panel") && window.columns.at(-1) !== now) window.columns.push(now);
        requestAnimationFrame(look);
    };
    look();
}"""


@pytest.mark.slow
def test_figures_are_drawn_live_and_stay(open_notebook: Open, picture: Picture) -> None:
    notebook = open_notebook("displays.ipynb", START, DRAWS)
    notebook.complete(0)
    notebook.page.evaluate(COLUMNS)
    notebook.run(1)
    panel = notebook.output(1).locator(".ring-panel")
    pictures = panel.locator(".jp-OutputArea img")
    notebook.until(lambda: pictures.count() == 2)
    assert panel.get_by_role("heading", name="the same on all ranks").count() == 1
    source = pictures.first.get_attribute("src")
    notebook.until(lambda: pictures.count() == 2 and pictures.first.get_attribute("src") != source)
    notebook.until(lambda: panel.locator("canvas").count() == 2)
    notebook.page.wait_for_timeout(500)
    assert notebook.page.evaluate("window.columns") == ["2 of 5"], "from the first moment, without a jump"
    # Pictures that change in place move nothing.
    heights = set()
    for _ in range(40):
        box = notebook.output(1).bounding_box()
        heights.add(round(box["height"]) if box else 0)
        notebook.page.wait_for_timeout(25)
    assert len(heights) == 1
    picture(notebook, 1, "displays")
    panel.get_by_role("button", name="Stop").click()
    notebook.output(1).locator(".ring-report").wait_for()
    notebook.wait_ended(1)
    saved = [output.get("data", {}) for output in notebook.save().cells[1].outputs]
    assert sum("image/png" in data for data in saved) == 2
    assert notebook.path.stat().st_size < 200_000
    picture(notebook, 1, "displays-saved")


@pytest.mark.slow
def test_figures_are_there_in_a_page_that_is_opened_later(open_notebook: Open) -> None:
    background = DRAWS.replace("--name", "--background --name")
    before = open_notebook("later.ipynb", START, background)
    before.complete(*range(2))
    before.until(lambda: before.output(1).locator(".ring-panel .jp-OutputArea img").count() == 2)
    before.save()
    before.close()

    again = open_notebook("later.ipynb")
    panel = again.output(1).locator(".ring-panel")
    again.until(lambda: panel.locator(".jp-OutputArea img").count() == 2)
    panel.get_by_role("button", name="Stop").click()
    expect(again.output(1)).to_contain_text("interrupted")
    assert again.output(1).locator("img[alt*=Figure]").count() + panel.locator(".jp-OutputArea img").count() >= 2
