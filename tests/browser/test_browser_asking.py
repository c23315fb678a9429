"""Ranks that ask, in a browser: at a breakpoint, in the background; plain cells on all ranks; a rank that dies."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, expect

from browser.lab import ARTIFACTS, NotebookPage, Open, Picture

START = "%load_ext ring_notebook\n%ring start -n 2\n%ring default on"
STOPS = """def inner(x):
    secret = x * 2
    breakpoint()
    return secret

total = inner(21) if ring.rank() == 1 else 0
ring.barrier()
print("over")"""
PRINTS = """import torch
from tqdm.auto import tqdm
for _ in tqdm(range(3), desc="work"): pass
for step in range(60): print("step", step)
torch.arange(4.0).reshape(2, 2) + ring.rank()"""
BACKGROUND = """%%ringtrain --background --out run
if ring.rank() == 1: name = input("Your name? ")
ring.barrier()"""
LOCAL = "%%local\nimport os\n'the kernel is ' + ('no rank' if 'RANK' not in os.environ else 'a rank')"
DIES = """import os, signal, time, torch
kept = 10 + ring.rank()
for step in range(200):
    loss = ring.allreduce(torch.tensor(1 / (step + 1)))
    ring.log(loss=loss, samples=32)
    time.sleep(0.01)
    if step == 150 and ring.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)"""
SURVIVORS = "globals().get('kept', 'lost')"


def answer(box: Locator, text: str) -> None:
    box.fill(text)
    box.press("Enter")


@pytest.fixture(scope="module")
def notebook(open_shared: Open) -> NotebookPage:
    """A notebook with a cluster of 2 that runs plain cells, and the cells of two tests."""
    cells = (STOPS, PRINTS, "ring.size()", LOCAL, BACKGROUND, "%ring debug", "ring.allreduce")
    notebook = open_shared("asking.ipynb", START, *cells)
    notebook.complete(0)
    return notebook


@pytest.mark.slow
def test_a_breakpoint_is_answered_in_the_page(notebook: NotebookPage, picture: Picture) -> None:
    notebook.run(1)
    output = notebook.output(1)
    box = output.locator(".jp-Stdin input").last  # JupyterLab removes an answered one a moment later

    output.locator("text=rank 1 (Pdb)").last.wait_for()
    output.locator("text=-> return secret").first.wait_for()
    answer(box, "p secret")
    output.locator("text=42").first.wait_for()
    notebook.page.wait_for_timeout(500)
    picture(notebook, 1, "breakpoint")
    answer(box, "c")
    notebook.wait_ended(1)
    expect(output).to_contain_text("over", use_inner_text=True)
    expect(output.locator(".jp-Stdin input")).to_have_count(0)
    asked = re.findall(r"rank 1 \(Pdb\) *(.*)", output.inner_text())
    assert asked == ["p secret", "c"], "a prompt for each answer, and no empty one after the last"

    notebook.complete(2)
    report = notebook.output(2)
    report.locator("summary", has_text="earlier lines").wait_for()
    assert not report.locator("text=step 0").first.is_visible()
    assert report.locator("text=step 59").first.is_visible()
    report.locator("summary", has_text="earlier lines").click()
    assert report.locator("text=step 0").first.is_visible()
    assert "100%" in report.inner_text()
    picture(notebook, 2, "output")


@pytest.mark.slow
def test_plain_cells_their_help_and_a_question_in_the_background(notebook: NotebookPage, picture: Picture) -> None:
    for cell in (3, 4):
        notebook.complete(cell)
    marked = notebook.output(3)
    assert marked.locator("text=2 ranks").first.is_visible()
    picture(notebook, 3, "default-on")
    assert marked.locator("text=/\\[0-1\\]\\s*2$/").count() == 1, "equal values once"
    expect(notebook.output(4)).to_contain_text("no rank", use_inner_text=True)
    assert "2 ranks" not in notebook.output(4).inner_text(), "a local cell has no mark"

    notebook.run(5)
    asks = notebook.output(5).locator("text=rank 1 asks 'Your name?': `%ring debug` answers.")
    asks.wait_for()
    picture(notebook, 5, "background-asks")
    notebook.run(6)
    box = notebook.output(6).locator(".jp-Stdin input").last
    notebook.output(6).locator("text=rank 1: Your name?").last.wait_for()
    answer(box, "Ada")
    notebook.wait_ended(6)
    notebook.output(5).locator(".ring-report").wait_for()

    notebook.cell(7).locator(".cm-content").click()
    notebook.page.keyboard.press("End")
    notebook.page.keyboard.press("Shift+Tab")
    tooltip = notebook.page.locator(".jp-Tooltip")
    tooltip.wait_for()
    assert "ring.allreduce(" in tooltip.inner_text()
    assert "Horovod:" in tooltip.inner_text()
    notebook.page.screenshot(path=ARTIFACTS / "tooltip.png")


@pytest.mark.slow
def test_a_death_is_told_and_healed_in_the_page(open_notebook: Open, picture: Picture) -> None:
    notebook = open_notebook("death.ipynb", START, DIES, SURVIVORS, "%ring heal", SURVIVORS)
    notebook.complete(*range(5))
    told = notebook.output(1).inner_text()
    assert told.count("was killed by SIGKILL") <= 2, "in the report and in the error"
    assert "`%ring heal` starts this one again" in told
    assert "CurveZMQ" not in told
    rows = notebook.output(1).locator(".ring-report .ring-table tbody tr")
    assert "stopped" in rows.nth(0).inner_text()
    assert "died" in rows.nth(1).inner_text()
    expect(notebook.output(2), "a cell that needs the dead rank says what to do").to_contain_text(
        "`%ring heal`", use_inner_text=True
    )
    expect(notebook.output(3)).to_contain_text("Started rank 1 again", use_inner_text=True)
    kept = notebook.output(4).inner_text()
    assert "10" in kept
    assert "lost" in kept
    for cell in (1, 2, 3, 4):
        picture(notebook, cell, f"death-{cell}")
