"""A rank that asks in a browser: pdb at a breakpoint, with commands typed into the page; and what is left of output."""

from __future__ import annotations

from collections.abc import Callable

from browser.lab import Lab, NotebookPage

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
for step in range(14): print("step", step)
torch.arange(4.0).reshape(2, 2) + ring.rank()"""


def test_a_breakpoint_is_answered_in_the_page(
    lab: Lab,
    open_notebook: Callable[[str], NotebookPage],
    picture: Callable[[NotebookPage, int, str], None],
) -> None:
    NotebookPage.write(lab.directory / "asking.ipynb", START, STOPS, PRINTS)
    notebook = open_notebook("asking.ipynb")
    notebook.run(0)
    notebook.wait_ended(0)

    notebook.run(1)
    output = notebook.output(1)
    box = output.locator(".jp-Stdin input").last  # JupyterLab removes an answered one a moment later

    def answer(command: str) -> None:
        box.fill(command)
        box.press("Enter")

    output.locator("text=rank 1 (Pdb)").last.wait_for(timeout=60_000)
    output.locator("text=return secret").first.wait_for()
    answer("p secret")
    output.locator("text=42").first.wait_for()
    notebook.page.wait_for_timeout(500)
    picture(notebook, 1, "breakpoint")
    answer("c")
    notebook.wait_ended(1)
    assert "over" in notebook.output(1).inner_text()

    notebook.run(2)
    notebook.wait_ended(2)
    report = notebook.output(2)
    report.locator("summary", has_text="earlier lines").wait_for()
    assert not report.locator("text=step 0").first.is_visible()
    assert report.locator("text=step 13").first.is_visible()
    report.locator("summary", has_text="earlier lines").click()
    assert report.locator("text=step 0").first.is_visible()
    assert "100%" in report.inner_text()
    picture(notebook, 2, "output")
