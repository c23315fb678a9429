"""The quickstart as a newcomer meets it: run, watch, save, and open again without a kernel."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest

from browser.lab import Lab, NotebookPage, Open, Picture

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "01_quickstart.ipynb"
TRAIN = 3  # the %%ringtrain cell, counted in code cells


def drawn(notebook: NotebookPage) -> bytes:
    """The first chart of the panel as a picture."""
    return notebook.output(TRAIN).locator(".ring-panel canvas").first.screenshot()


def step(notebook: NotebookPage) -> int:
    """The step of rank 0 in the table of the panel; -1 when there is none yet."""
    cells = notebook.output(TRAIN).locator(".ring-panel .ring-table tbody tr td:nth-child(3)").all_inner_texts()
    return int(cells[0]) if cells else -1


@pytest.mark.timeout(600)  # the whole notebook, drawn out, and once more without a kernel
def test_the_quickstart(lab: Lab, open_notebook: Open, picture: Picture) -> None:
    # The steps are drawn out, or a fast machine would be done before the test has looked twice (and a slow one, where
    # training takes every core, before the browser has drawn once), until it has.
    seen = lab.directory / "seen"
    wait = f"__import__('os').path.exists('{seen}') or __import__('time').sleep(0.04)"
    source = QUICKSTART.read_text().replace("optimizer.step()", f"optimizer.step(); {wait}")
    assert "sleep" in source
    (lab.directory / "quickstart.ipynb").write_text(source)
    notebook = open_notebook("quickstart.ipynb")
    notebook.complete(*range(TRAIN))

    notebook.run(TRAIN)
    panel = notebook.output(TRAIN).locator(".ring-panel")
    panel.wait_for()
    panel.scroll_into_view_if_needed()
    notebook.until(lambda: panel.locator("canvas").count() == 2 and step(notebook) > 0)
    before, at = drawn(notebook), step(notebook)
    notebook.until(lambda: step(notebook) > at + 20 and drawn(notebook) != before)
    assert panel.get_by_role("button", name="Stop").is_visible()
    assert panel.locator(".ring-table tbody tr").count() == 2
    if "RING_PICTURES" in os.environ:
        notebook.until(lambda: step(notebook) > 600)
    picture(notebook, TRAIN, "panel")
    seen.touch()

    notebook.wait_ended(TRAIN)
    notebook.output(TRAIN).locator(".ring-report").wait_for()
    assert panel.count() == 0
    picture(notebook, TRAIN, "report")
    for cell in range(TRAIN + 1, notebook.page.locator(".jp-CodeCell").count()):
        notebook.complete(cell)
    said = "".join(notebook.page.locator(".jp-OutputArea").all_inner_texts())
    assert "Error" not in said
    accuracy = float(said.partition("test accuracy here: ")[2].partition("%")[0])
    assert accuracy >= 97
    saved = notebook.save()
    notebook.shut_down()
    without_a_kernel(saved, lab.directory / "mailed.ipynb", open_notebook)


def without_a_kernel(saved: nbformat.NotebookNode, path: Path, open_notebook: Open) -> None:
    """What someone sees who is sent the notebook: not signed, no kernel."""
    # With a language alone JupyterLab starts a kernel of it, and says "No Kernel" until then.
    del saved.metadata["kernelspec"], saved.metadata["language_info"]
    nbformat.write(saved, path)
    assert path.stat().st_size < 300_000  # half of it on an idle machine, where a step takes no second
    notebook = open_notebook(path.name)
    notebook.page.get_by_role("dialog").get_by_role("button", name="No Kernel").click()
    output = notebook.output(TRAIN)
    charts = output.locator("img[alt*=' over ']:visible")  # those of what the machines did are folded away
    charts.first.wait_for()
    assert charts.count() == 2
    assert all(image.evaluate("image => image.complete && image.naturalWidth > 0") for image in charts.all())
    # The page trusts nothing and drops our style sheet: the corner of a chart still widens it.
    output.locator(".ring-wide").first.scroll_into_view_if_needed()
    before = charts.first.bounding_box()
    corner = output.locator(".ring-wide").first.bounding_box()
    assert before is not None
    assert corner is not None
    notebook.page.mouse.move(corner["x"] + corner["width"] - 4, corner["y"] + corner["height"] - 4)
    notebook.page.mouse.down()
    notebook.page.mouse.move(corner["x"] + corner["width"] + 50, corner["y"] + corner["height"] - 4, steps=5)
    notebook.page.mouse.up()
    assert charts.first.bounding_box()["width"] > before["width"] + 40  # type: ignore[index]
    assert output.locator("tbody tr").count() == 2
    assert "ok" in output.inner_text()
    assert notebook.page.locator(".jupyter-widgets").count() == 0
