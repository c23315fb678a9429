"""The panel at sizes that this machine has no cores for: simulated ranks, to see that it stays readable."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Locator, expect

from browser.lab import Lab, NotebookPage
from browser.simulated import BEGINNING, BROKEN, REPORT, STUCK, TRAINING

RANKS = (1, 2, 8, 128)
WIDTHS = (1200, 800)
SCENES = {"running": TRAINING, "report": REPORT, "stuck": STUCK, "broken": BROKEN, "beginning": BEGINNING}
# By default one live panel and one report; all others, and the dark theme, are slow.
DEFAULT = {("running", 8), ("report", 8)}


@pytest.fixture(scope="module", params=["Light", pytest.param("Dark", marks=pytest.mark.slow)])
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


def show(notebook: NotebookPage, cell: int, scene: str) -> Locator:
    """Run the cell of a scene; returns its panel or report when it is complete."""
    notebook.run(cell)
    notebook.wait_ended(cell)
    shown = notebook.output(cell).locator(".ring-report" if scene == "report" else ".ring-panel").first
    shown.wait_for(timeout=60_000)
    if scene == "report":
        charts = shown.locator("img")
        notebook.until(lambda: charts.count() >= 4)
    elif scene != "beginning":
        charts = shown.locator("canvas")
        notebook.until(lambda: charts.count() >= 4)
    return shown


def fits(notebook: NotebookPage, shown: Locator, scene: str, size: int) -> None:
    """Nothing is wider than the cell, charts fill it, and the slow rank is marked where there are others."""
    assert shown.evaluate("element => element.scrollWidth <= element.clientWidth")
    if scene == "beginning":
        assert "at line 2: model, optimizer, loader" in shown.inner_text()
        return
    width = shown.bounding_box()["width"]  # type: ignore[index]
    boxes = [chart.bounding_box() for chart in shown.locator("img" if scene == "report" else "canvas").all()]
    right = max(box["x"] + box["width"] for box in boxes if box)
    left = min(box["x"] for box in boxes if box)
    assert right - left > 0.93 * width
    said = shown.inner_text()
    assert ("slower in compute; the others wait 28%" in said) == (size > 1 and scene != "stuck")
    assert shown.locator(".ring-slow").count() == (size > 1)
    assert ("stuck for" in said) == (scene == "stuck")
    assert ("loss is NaN on rank 1 since step 151" in said) == (scene == "broken")


@pytest.mark.parametrize(
    ("scene", "size"),
    [
        pytest.param(scene, size, id=f"{scene}-{size}", marks=() if (scene, size) in DEFAULT else pytest.mark.slow)
        for scene in SCENES
        for size in RANKS
        if size > 1 or scene not in ("stuck", "broken")
    ],
)
def test_readable_at_any_size(
    lab: Lab,
    open_notebook: Callable[[str], NotebookPage],
    picture: Callable[[NotebookPage, int, str], None],
    request: pytest.FixtureRequest,
    scene: str,
    size: int,
) -> None:
    dark = "Dark" in request.node.name
    name = f"{scene}-{size}"
    cell = SCENES[scene].format(size=size, run=name, name="digits")
    NotebookPage.write(lab.directory / f"{name}.ipynb", cell)
    notebook = open_notebook(f"{name}.ipynb")
    assert notebook.page.locator("body").get_attribute("data-jp-theme-light") == ("false" if dark else "true")
    shown = show(notebook, 0, scene)
    for width in WIDTHS:
        notebook.page.set_viewport_size({"width": width, "height": 1400})
        notebook.page.wait_for_timeout(1000)
        fits(notebook, shown, scene, size)
        picture(notebook, 0, f"{name}-{width}{'-dark' if dark else ''}")


def test_charts_answer_to_the_mouse(lab: Lab, open_notebook: Callable[[str], NotebookPage]) -> None:
    """Hover shows every rank's value, live and in the report; a click on a label draws that rank, a button the log."""
    live, report = (
        scene.format(size=4, run=f"mouse-{name}", name="digits")
        for name, scene in (("live", TRAINING), ("still", REPORT))
    )
    NotebookPage.write(lab.directory / "mouse.ipynb", live, "print(log.look)", report)
    notebook = open_notebook("mouse.ipynb")
    panel = show(notebook, 0, "running")
    chart = panel.locator("canvas").first
    chart.scroll_into_view_if_needed()
    chart.hover(position={"x": 200, "y": 120})
    expect(panel).to_contain_text("mean of 4 ranks")
    panel.get_by_role("button", name="log").click()
    notebook.run(1)
    notebook.wait_ended(1)
    expect(notebook.output(1)).to_contain_text("log=True")
    shown = show(notebook, 2, "report")
    tip = shown.locator(".ring-chart").first.locator("i").nth(20)
    tip.hover()
    assert "mean of 4 ranks" in tip.evaluate("element => getComputedStyle(element, '::after').content")


def test_stop_is_reached_without_a_mouse_in_a_panel(lab: Lab, open_notebook: Callable[[str], NotebookPage]) -> None:
    NotebookPage.write(lab.directory / "keys.ipynb", TRAINING.format(size=1, run="keys", name="digits"))
    notebook = open_notebook("keys.ipynb")
    button = show(notebook, 0, "running").get_by_role("button", name="Stop")
    button.focus()
    notebook.page.keyboard.press("Enter")
    notebook.output(0).get_by_role("button", name="Stopping").wait_for(timeout=60_000)
