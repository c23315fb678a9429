"""The panel at sizes that this machine has no cores for: simulated ranks, to see that it stays readable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from browser.lab import Lab, NotebookPage, Open, Picture
from browser.simulated import BEGINNING, BROKEN, LOGICAL, REPORT, STUCK, TRAINING, WIDE

RANKS = (1, 2, 8, 128)
WIDTHS = (1401, 1200, 800, 700)  # with an odd one, half a pixel is left for each chart
SCROLLS = """shown => [...shown.querySelectorAll("*")].filter(one => one.scrollWidth > one.clientWidth
    && ["auto", "scroll"].includes(getComputedStyle(one).overflowX)).map(one => one.className)"""
CUT = """tables => tables.filter(table => {
    const frame = table.closest(".ring-rows, .widget-html, .ring-panel, .ring-report").getBoundingClientRect();
    return table.getBoundingClientRect().right > frame.right + 0.5;
}).map(table => table.innerText)"""
BESIDE = """cells => cells.filter(cell => cell.firstChild.getClientRects().length).every(cell => {
    const text = document.createRange();
    text.selectNode(cell.lastChild);
    return cell.firstChild.getBoundingClientRect().right <= text.getBoundingClientRect().left + 0.5;
})"""
OVER = "cells => cells.filter(cell => cell.scrollWidth > cell.clientWidth + 1).map(cell => cell.innerText)"
SCENES = {
    "running": TRAINING,
    "report": REPORT,
    "stuck": STUCK,
    "broken": BROKEN,
    "logical": LOGICAL,
    "beginning": BEGINNING,
    "wide": WIDE,
}
# By default one live panel and one report; all others, and the dark theme, are slow.
DEFAULT = {("running", 8), ("report", 8), ("wide", 8)}


RUNS = """
from ring_notebook.notebook.table import Listing
Listing(
    ["run", "seconds", "loss", "layers"],
    [["a", "1.0", "0.5", "3"], ["b", "2.0", "0.25", "3"], ["c", "30.0", "", "3"]],
    "",
    {"seconds": [1.0, 2.0, 30.0], "loss": [0.5, 0.25, None]},
    folded=["layers"],
)
"""


@pytest.fixture(scope="module", params=["Light", pytest.param("Dark", marks=pytest.mark.slow)])
def themed_lab(
    chromium: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Lab]:
    """A server with this theme."""
    if request.param == "Light":
        yield request.getfixturevalue("server").in_folder("light")
        return
    lab = Lab(tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("lab"), theme=f"JupyterLab {request.param}")
    yield lab
    lab.close()


@pytest.fixture
def lab(themed_lab: Lab) -> Lab:
    return themed_lab


def show(notebook: NotebookPage, cell: int, scene: str) -> Locator:
    """Run the cell of a scene; returns its panel or report when it is complete."""
    notebook.complete(cell)
    shown = notebook.output(cell).locator(".ring-report" if scene == "report" else ".ring-panel").first
    shown.wait_for()
    if scene == "report":
        charts = shown.locator(".ring-wide img")
        notebook.until(lambda: charts.count() >= 4)
    elif scene != "beginning":
        charts = shown.locator("canvas")
        notebook.until(lambda: charts.count() >= 4)
    return shown


def found(shown: Locator, selector: str, judge: str) -> Any:
    """What ``judge`` makes of the elements in one step: a live panel replaces its tables meanwhile."""
    return shown.evaluate(f"shown => ({judge})([...shown.querySelectorAll('{selector}')])")


def fits(notebook: NotebookPage, shown: Locator, scene: str, size: int) -> None:
    """Nothing is wider than the cell, charts fill it, and the slow rank is marked where there are others."""
    assert shown.evaluate("element => element.scrollWidth <= element.clientWidth")
    assert shown.evaluate(SCROLLS) == [], "no scroll bar along the page"
    if scene == "beginning":
        assert "at line 2: model, optimizer, loader" in shown.inner_text()
        return
    width = shown.bounding_box()["width"]  # type: ignore[index]
    boxes = [
        chart.bounding_box()
        for chart in shown.locator(".ring-wide img, .ring-axis" if scene == "report" else "canvas").all()
    ]
    right = max(box["x"] + box["width"] for box in boxes if box)
    left = min(box["x"] for box in boxes if box)
    assert right - left > 0.93 * width
    assert shown.locator("th:text-is('GPU mem')").count() == 1
    assert found(shown, ".ring-table", CUT) == [], "nothing of a table is cut"
    assert found(shown, ".ring-fit :is(th, td)", OVER) == [], "no text lies over the next column"
    assert shown.locator("span:text-is('loading'):visible").count() == 1, "what the colors of the bars mean"
    if scene == "report":  # what zooms a chart covers nothing that its title says
        zoom, chart = (shown.locator(one).first.bounding_box() for one in (".ring-zoom summary", ".ring-wide img"))
        assert zoom["y"] > chart["y"] + chart["height"] / 2  # type: ignore[index]
    assert found(shown, "td.ring-load", BESIDE), "sparklines beside their numbers"
    said = shown.inner_text()
    assert ("slower in compute; the others wait 28%" in said) == (size > 1 and scene != "stuck")
    assert shown.locator(".ring-slow").count() == (size > 1)
    assert ("stuck for" in said) == (scene == "stuck")
    assert ("8 logical ranks on 2" in said) == (scene == "logical")
    if scene == "logical":
        rows = shown.locator(".ring-table tbody tr td:first-child").all_inner_texts()
        each = [f"■ logical {turn}" for turn in range(8)]
        assert [one.strip() for one in rows] == ["0", *each[:4], "1 slow", *each[4:]]
    assert ("loss is NaN on rank 1 since step 151" in said) == (scene == "broken")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "size"),
    [
        pytest.param(scene, size, id=f"{scene}-{size}", marks=() if (scene, size) in DEFAULT else pytest.mark.slow)
        for scene in SCENES
        for size in RANKS
        if (size > 1 or scene not in ("stuck", "broken")) and (size == 2 or scene != "logical")
    ],
)
def test_readable_at_any_size(
    open_notebook: Open, picture: Picture, request: pytest.FixtureRequest, scene: str, size: int
) -> None:
    dark = "Dark" in request.node.name
    name = f"{scene}-{size}"
    cell = SCENES[scene].format(size=size, run=name, name="digits")
    notebook = open_notebook(f"{name}.ipynb", cell)
    assert notebook.page.locator("body").get_attribute("data-jp-theme-light") == ("false" if dark else "true")
    shown = show(notebook, 0, scene)
    for scale in (1, 2):
        for width in WIDTHS:
            notebook.size(width, scale=scale)
            fits(notebook, shown, scene, size)
            if scale == 2:
                picture(notebook, 0, f"{name}-{width}{'-dark' if dark else ''}")


@pytest.mark.slow
def test_charts_answer_to_the_mouse_and_stop_to_a_key(open_notebook: Open, picture: Picture) -> None:
    """Hover shows every rank's value, live and in the report; a button draws the log. Stop answers to the keyboard.

    A click zooms into a chart of the report, another one shows all of it again.
    """
    live, report = (
        scene.format(size=4, run=f"mouse-{name}", name="digits")
        for name, scene in (("live", TRAINING), ("still", REPORT))
    )
    notebook = open_notebook("mouse.ipynb", live, "print(log.look)", report)
    panel = show(notebook, 0, "running")
    chart = panel.locator("canvas").first
    chart.scroll_into_view_if_needed()
    chart.hover(position={"x": 200, "y": 120})
    expect(panel).to_contain_text("mean of 4")
    panel.get_by_role("button", name="log").click()
    notebook.complete(1)
    expect(notebook.output(1)).to_contain_text("log=True")
    shown = show(notebook, 2, "report")
    tip = shown.locator(".ring-chart").first.locator("i").nth(20)
    tip.hover()
    assert "mean of 4" in tip.evaluate("element => getComputedStyle(element, '::after').content")
    image, zoom = shown.locator(".ring-wide img").first, shown.locator(".ring-zoom summary").first
    before = image.bounding_box()["width"]  # type: ignore[index]
    zoom.click()
    assert image.bounding_box()["width"] == pytest.approx(5 * before)  # type: ignore[index]
    frame = shown.locator(".ring-frame").first
    assert frame.evaluate("frame => (frame.scrollLeft = 900) && frame.scrollLeft") == 900
    assert shown.evaluate("element => element.scrollWidth <= element.clientWidth")
    picture(notebook, 2, "zoomed")
    zoom.click()
    assert image.bounding_box()["width"] == before  # type: ignore[index]
    panel.get_by_role("button", name="Stop").focus()
    notebook.page.keyboard.press("Enter")
    panel.get_by_role("button", name="Stopping").wait_for()


@pytest.mark.slow
def test_runs_are_sorted_by_a_click_without_a_kernel(lab: Lab, open_notebook: Open, picture: Picture) -> None:
    notebook = open_notebook("runs.ipynb", RUNS)
    notebook.complete(0)
    notebook.save()
    notebook.shut_down()
    notebook.page.goto(lab.address("runs.ipynb"))
    table = notebook.output(0).locator(".ring-table")
    table.wait_for()

    def shown() -> list[str]:
        rows = table.locator("tbody tr").all()
        return [row.locator("td").first.inner_text() for row in sorted(rows, key=lambda row: row.bounding_box()["y"])]  # type: ignore[index]

    assert shown() == ["a", "b", "c"]
    table.get_by_title("loss: smallest first").click()
    assert shown() == ["b", "a", "c"]
    picture(notebook, 0, "runs")
    table.get_by_title("loss: largest first").click()
    assert shown() == ["a", "b", "c"]
    table.get_by_title("seconds: largest first").click()
    assert shown() == ["c", "b", "a"]
    layers = table.get_by_title("layers", exact=True)
    assert not layers.is_visible()
    more = table.get_by_text("more columns")
    more.click()
    table.get_by_label("layers").check()
    assert layers.is_visible()
    table.get_by_label("layers").uncheck()

    def boxes() -> list[str]:
        return [one.strip() for one in table.locator("details label:visible").all_inner_texts()]

    assert boxes() == ["layers"], "all others have room"
    for width in (800, 500, 400, 300):
        notebook.size(width)
        assert table.evaluate("table => table.scrollWidth <= table.clientWidth"), "no column is cut"
        there = [one for one in ("seconds", "loss") if table.get_by_title(one, exact=True).is_visible()]
        assert boxes() == [one for one in ("seconds", "loss", "layers") if one not in there]
    assert "loss" not in there
    table.get_by_label("loss").check()
    assert table.get_by_title("loss", exact=True).is_visible()
