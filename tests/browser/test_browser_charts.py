"""Many metrics in a panel: groups, the search field, the x axis, smoothing, pictures; and their report."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from browser.lab import ARTIFACTS, Open, Picture
from browser.simulated import MANY

SIZES = (1400, 700)


@pytest.mark.slow
def test_a_reader_finds_and_arranges_charts(open_notebook: Open, picture: Picture) -> None:
    cell = MANY.format(size=8, run="many", name="digits")
    notebook = open_notebook("charts.ipynb", cell, "print(log.look)", "log.finish('ok'); panel.close()")
    notebook.complete(0)
    panel = notebook.output(0).locator(".ring-panel").first
    charts = panel.locator("canvas")
    expect(charts).to_have_count(7)
    expect(panel.get_by_role("button", name="more")).to_have_count(2)
    expect(panel.get_by_text("input · step 399")).to_be_visible()

    def pictures(name: str) -> None:
        for width in SIZES:
            notebook.size(width)
            assert panel.evaluate("shown => shown.scrollWidth <= shown.clientWidth")
            picture(notebook, 0, f"charts-{name}-{width}")

    pictures("groups")
    panel.get_by_role("button", name="7 more").click()
    expect(charts).to_have_count(14)
    panel.get_by_placeholder("search charts").fill("grad 3")
    expect(charts).to_have_count(1)
    panel.get_by_placeholder("search charts").fill("none of them")
    expect(charts).to_have_count(0)
    expect(panel.get_by_text("no metric has these words")).to_be_visible()
    panel.get_by_placeholder("search charts").fill("")
    panel.get_by_role("button", name="fewer").click()
    expect(charts).to_have_count(7)
    panel.locator(".ring-choices select").select_option("by epoch")
    slider = panel.locator(".ring-choices [role=slider], .ring-choices .noUi-handle").first
    slider.focus()
    for _ in range(3):
        notebook.page.keyboard.press("PageUp")
    pictures("smooth")
    notebook.complete(1)
    look = notebook.output(1).inner_text()
    assert "x='epoch', search='', groups=frozenset()" in look
    assert "smooth=0.0" not in look
    notebook.run(2)
    report = notebook.output(0).locator(".ring-report")
    drawn = report.locator("img[alt*='over epoch']:visible")
    expect(drawn).to_have_count(12)
    report.get_by_text("2 more metrics").click()
    report.get_by_text("grad/layer_9").click()
    expect(drawn).to_have_count(13)
    notebook.picture(0, ARTIFACTS / "charts-folded.png")
    expect(report.locator(".ring-media img")).to_have_count(2)
    expect(report.get_by_text("input · step 399")).to_be_visible()
