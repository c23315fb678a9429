"""A JupyterLab and a browser for the tests of this folder, and where their pictures go."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from browser.lab import ARTIFACTS, CELL_SECONDS, Lab, NotebookPage

DOCS = Path(os.environ.get("RING_PICTURES", ARTIFACTS))


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """Chromium without a screen."""
    expect.set_options(timeout=CELL_SECONDS * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def lab(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A server whose notebooks lie in a folder of their own."""
    lab = Lab(tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


@pytest.fixture
def open_notebook(lab: Lab, browser: Browser) -> Iterator[Callable[[str], NotebookPage]]:
    """Opens a notebook of the lab's folder in a tab; its kernel is ended after the test."""
    opened: list[NotebookPage] = []

    def open_one(name: str) -> NotebookPage:
        page = browser.new_page(viewport={"width": 1200, "height": 1500}, device_scale_factor=2)
        page.set_default_timeout(CELL_SECONDS * 1000)
        opened.append(NotebookPage(page, lab, name))
        return opened[-1]

    yield open_one
    for notebook in opened:
        notebook.shut_down()
        notebook.close()


@pytest.fixture
def picture() -> Callable[[NotebookPage, int, str], None]:
    """Saves what a cell shows as a picture to look at; `make screenshot` renews those that the docs show."""

    def save(notebook: NotebookPage, cell: int, name: str) -> None:
        folder = DOCS if (DOCS / f"{name}.png").exists() else ARTIFACTS
        folder.mkdir(parents=True, exist_ok=True)
        notebook.output(cell).screenshot(path=folder / f"{name}.png")

    return save
