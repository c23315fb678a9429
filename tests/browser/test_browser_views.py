"""What else a browser shows of a run: its timeline, in another notebook, and in a page that was closed meanwhile."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from playwright.sync_api import Locator, expect

from browser.lab import Lab, NotebookPage, Open, Picture
from browser.simulated import TRAINING
from ring_notebook.notebook.run.timeline import MIME

START = "%load_ext ring_notebook\n%ring start -n 2"
TIMELINE = """%%ringtrain --name slow --timeline
import time, torch
for step in range(30):
    ring.allreduce(torch.ones(100_000), name="gradient")
    time.sleep(0.01 + 0.02 * (ring.rank() == 1))
"""
FAILS = "%%ringtrain --name checks --background\nimport time\ntime.sleep(1)\nassert ring.rank() == 0"
KEPT = "%load_ext ring_notebook\n%ring start -n 2 --keep"
LONG = """%%ringtrain --name long --background
import time
print("printed before anybody else looked")
for step in range(100_000):
    ring.log(loss=1 / (step + 1), samples=1)
    time.sleep(0.01)
"""
ATTACH = "%load_ext ring_notebook\n%ring attach first.ipynb"
BLOCKING = LONG.replace(" --background", "")

# Keeps where on its canvas each text of the newest drawing begins and ends, and how high it is.
TEXTS = """() => {
    const draw = CanvasRenderingContext2D.prototype.fillText;
    let fresh = false;
    CanvasRenderingContext2D.prototype.fillText = function(text, x, y, ...rest) {
        if (!fresh) { fresh = true; window.texts = []; queueMicrotask(() => { fresh = false; }); }
        const matrix = this.getTransform(), at = matrix.transformPoint(new DOMPoint(x, y));
        const width = this.measureText(text).width * matrix.a;
        const left = at.x - width * ({center: 0.5, right: 1, end: 1}[this.textAlign] || 0);
        window.texts.push([text, left, left + width, at.y]);
        return draw.call(this, text, x, y, ...rest);
    };
}"""


@pytest.fixture(scope="module")
def notebook(open_shared: Open) -> NotebookPage:
    """A notebook with a cluster of 2 and a cell for each of two tests, whose ends are told in notices."""
    notebook = open_shared("notices.ipynb", f"{START}\n%ring notify --after 0", TIMELINE, FAILS)
    notebook.complete(0)
    return notebook


@pytest.mark.slow
def test_the_timeline_is_drawn_and_can_be_zoomed(notebook: NotebookPage, picture: Picture) -> None:
    notebook.complete(1)
    # The end of the run is told in JupyterLab's own notifications, which are seen in all its tabs.
    notice = notebook.page.locator(".Toastify__toast", has_text="ok · slow · 2 ranks")
    notice.wait_for()
    notice.get_by_role("button").first.click()
    said = re.compile(r"Rank 1 is [\d.]+x slower in sleeping or waiting outside of collectives; the others wait")
    expect(notebook.output(1)).to_contain_text(said, use_inner_text=True)
    expect(notebook.output(1).locator("th", has_text="asleep")).to_be_visible()
    chart = notebook.output(1).locator(".vega-embed canvas").first
    chart.wait_for()
    chart.scroll_into_view_if_needed()
    picture(notebook, 1, "timeline")

    # It is as wide as the page lets it, no part of it is cut off, and none is squeezed after another screen.
    def fits(scale: float) -> bool:
        shown = notebook.output(1)
        place, output, menu = (one.bounding_box() for one in (chart, shown, shown.locator(".vega-embed summary")))
        assert place is not None
        assert output is not None
        assert menu is not None
        ends = [one["x"] + one["width"] - output["x"] for one in (place, menu)]
        drawn = chart.evaluate("one => one.width / one.getBoundingClientRect().width")
        return max(ends) <= output["width"] and ends[0] > 0.85 * output["width"] and abs(drawn / scale - 1) < 0.01

    for width, scale in ((1400, 1), (700, 2), (1400, 1), (700, 1), (1200, 1)):
        notebook.size(width, height=1500, scale=scale)
        notebook.until(lambda: fits(scale))  # noqa: B023
        picture(notebook, 1, f"timeline-{width}")
    before = chart.screenshot()
    chart.hover()
    notebook.page.mouse.wheel(0, -600)
    notebook.until(lambda: chart.screenshot() != before)
    picture(notebook, 1, "timeline-zoomed")
    notebook.page.evaluate(TEXTS)
    for _ in range(12):
        notebook.page.mouse.wheel(0, -600)
        notebook.page.wait_for_timeout(100)
        texts = notebook.page.evaluate("window.texts || []")
        times: list[tuple[float, float, str]] = []  # of the last drawing, each of which goes from left to right
        for text, left, right, _ in texts:
            if re.fullmatch(r"\d+\.\d+", text):
                times = [*(times if not times or left > times[-1][0] else []), (left, right, text)]
        assert [pair for pair in pairwise(times) if pair[0][1] + 6 > pair[1][0]] == [], "labels lie over each other"
    assert len(times) > 1
    picture(notebook, 1, "timeline-deep")
    # In a page that is opened later it is as wide; it is in the notebook, as numbers and not as a widget.
    (saved,) = [output for output in notebook.save().cells[1].outputs if MIME in output.get("data", {})]
    assert len(saved["data"][MIME]["data"]["values"]) > 60
    assert notebook.path.stat().st_size < 200_000
    notebook.page.reload()
    chart.wait_for()
    notebook.until(
        lambda: chart.bounding_box()["width"] > 0.85 * notebook.output(1).bounding_box()["width"]  # type: ignore[index]
    )
    picture(notebook, 1, "timeline-reopened")


@pytest.mark.slow
def test_a_failure_in_the_background_is_told_in_its_panel_and_in_a_notice(
    notebook: NotebookPage, picture: Picture
) -> None:
    notebook.complete(2)
    notice = notebook.page.locator(".Toastify__toast", has_text="failed · checks")
    notice.wait_for()
    expect(notice).to_contain_text("AssertionError: assert ring.rank() == 0 (rank 1, line 4)")
    for part in ("Traceback (most recent call last):", "Cell, line 4, in <module>", "raised on rank 1"):
        expect(notebook.output(2)).to_contain_text(part, use_inner_text=True)
    picture(notebook, 2, "background-failed")


@pytest.mark.slow
def test_a_page_whose_kernel_is_gone_shows_the_last_state(open_notebook: Open, picture: Picture) -> None:
    """In the page itself after a restart, and in a page that is opened later: what was there, and what to do."""
    cell = TRAINING.format(size=2, run="gone", name="digits")
    notebook = open_notebook("gone.ipynb", cell, "'another kernel'")
    notebook.complete(0)
    panel = notebook.output(0).locator(".ring-panel")
    notebook.until(lambda: panel.locator("canvas").count() >= 4)
    kept, gone = notebook.output(0).locator(".ring-last"), panel.locator(".ring-gone")
    notebook.until(lambda: kept.locator(".ring-chart").count() >= 4)  # as it is renewed
    assert not kept.is_visible(), "beside the panel there is no picture of it"
    assert not gone.is_visible()
    notebook.save()

    notebook.restart()
    gone.wait_for()
    expect(gone).to_contain_text("%ring attach shows it")
    assert not panel.get_by_role("button").first.is_visible(), "nobody would hear it"
    assert panel.locator("canvas").count() >= 4
    look = "element => getComputedStyle(element, '::before').content"
    assert {one.evaluate(look) for one in panel.locator(".jupyter-widgets-disconnected").all()} == {"none"}
    assert panel.locator(".ring-status").evaluate("one => getComputedStyle(one, '::after').content") == (
        '"● last state seen"'
    )
    picture(notebook, 0, "restarted")
    notebook.save()

    later = open_notebook("gone.ipynb")
    kept = later.output(0).locator(".ring-last")
    kept.wait_for()
    later.until(lambda: "model not found" in later.output(0).evaluate("one => one.textContent"))
    expect(kept).to_contain_text("last state seen", use_inner_text=True)
    expect(kept).to_contain_text("%ring attach shows it", use_inner_text=True)
    assert kept.locator(".ring-chart").count() >= 4
    assert "model not found" not in later.output(0).inner_text()
    picture(later, 0, "reopened-gone")


@pytest.mark.slow
def test_a_second_notebook_sees_the_run_of_the_first(lab: Lab, open_notebook: Open, picture: Picture) -> None:
    NotebookPage.write(lab.directory / "first.ipynb", KEPT, LONG, "%ring stop")
    NotebookPage.write(lab.directory / "second.ipynb", ATTACH)
    first = open_notebook("first.ipynb")
    first.complete(*range(2))
    first.output(1).locator(".ring-panel").wait_for()
    try:
        second = open_notebook("second.ipynb")
        second.complete(0)
        expect(second.output(0)).to_contain_text("Run long is in progress.", use_inner_text=True)
        panel = second.output(0).locator(".ring-panel")
        panel.wait_for()
        expect(panel).to_contain_text("printed before anybody else looked")
        rows = panel.locator(".ring-table:has(th:text-is('loss')) tbody tr")
        second.until(lambda: rows.count() == 2)
        steps = rows.first.locator("td").nth(2)
        seen = int(steps.inner_text())
        second.until(lambda: int(steps.inner_text()) > seen + 20)
        picture(second, 0, "attached")
        panel.get_by_role("button", name="Stop").click()
        for notebook, cell in ((first, 1), (second, 0)):
            report = notebook.output(cell).locator(".ring-report")
            report.wait_for()
            assert report.locator("text=interrupted").count() >= 1
    finally:
        first.complete(2)


def grows(notebook: NotebookPage, panel: Locator) -> None:
    """The steps of rank 0 in the table of the panel go on, and a curve is drawn further."""
    steps = panel.locator(".ring-table:has(th:text-is('loss')) tbody tr").first.locator("td").nth(2)
    chart = panel.locator("canvas").first
    seen, drawn = int(steps.inner_text()), chart.screenshot()
    notebook.until(lambda: int(steps.inner_text()) > seen + 20 and chart.screenshot() != drawn)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [LONG, BLOCKING], ids=["background", "blocking"])
def test_a_page_that_was_closed_in_the_middle_shows_all_of_it(
    lab: Lab, open_notebook: Open, picture: Picture, cell: str
) -> None:
    before = open_notebook("closed.ipynb", START, cell, "%ring attach")
    before.complete(0)
    before.run(1)
    printed = before.output(1).locator(".ring-panel")
    expect(printed).to_contain_text("printed before anybody else looked")
    before.save()
    before.close()

    again = open_notebook("closed.ipynb")  # seconds, in which the run goes on
    panel = again.output(1).locator(".ring-panel")
    panel.wait_for()
    expect(panel).to_contain_text("printed before anybody else looked")
    grows(again, panel)
    picture(again, 1, "reopened-busy" if cell is BLOCKING else "reopened")
    if cell is BLOCKING:  # another notebook sees it too, with the command that a page without widgets names
        NotebookPage.write(lab.directory / "other.ipynb", "%load_ext ring_notebook\n%ring attach closed.ipynb")
        assert "`%ring attach closed.ipynb`" in (again.output(1).locator(".ring-last").text_content() or "")
        other = open_notebook("other.ipynb")
        other.complete(0)
        grows(other, other.output(0).locator(".ring-panel"))
        picture(other, 0, "attached-to-busy")
    panel.get_by_role("button", name="Stop").click()
    # The page does not know the place of the report, so the panel has turned into it.
    expect(again.output(1).locator(".ring-report")).to_contain_text("interrupted")
    expect(again.output(1).locator(".ring-report")).to_contain_text("stopped at line")
    again.complete(2)
    report = again.output(2).locator(".ring-report")
    expect(report).to_contain_text("interrupted")
    expect(report).to_contain_text("printed before anybody else looked")
    expect(again.output(2)).to_contain_text("Run long has ended.", use_inner_text=True)
