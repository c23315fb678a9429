"""One JupyterLab and one browser for the tests of this folder, and where their pictures go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, expect, sync_playwright

from browser.lab import ARTIFACTS, Lab, NotebookPage, Open, Picture
from harness.forked_ranks import ForkServer
from harness.leftovers import SharedProcesses
from harness.waiting import LIMIT

DOCS = Path(os.environ.get("RING_PICTURES", ARTIFACTS))


@pytest.fixture(scope="package")
def shared() -> Iterator[SharedProcesses]:
    """What the files of this folder share; nothing of it is left at their end."""
    with SharedProcesses() as processes:
        yield processes


@pytest.fixture(scope="package")
def browser(chromium: str, shared: SharedProcesses) -> Iterator[BrowserContext]:
    """Chromium without a screen. What it has loaded of JupyterLab once it keeps."""
    expect.set_options(timeout=LIMIT * 1000)
    with ExitStack() as stack:
        with shared.start():
            playwright = stack.enter_context(sync_playwright())
            chrome = playwright.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
            )
        # Chromium draws without a GPU: pictures for the documentation cost four times as much.
        context = chrome.new_context(
            viewport={"width": 1200, "height": 1500}, device_scale_factor=2 if "RING_PICTURES" in os.environ else 1
        )
        context.set_default_timeout(LIMIT * 1000)
        yield context
        chrome.close()


@pytest.fixture(scope="package")
def server(
    chromium: str, tmp_path_factory: pytest.TempPathFactory, shared: SharedProcesses, fork_server: ForkServer
) -> Iterator[Lab]:
    """The server of all files; `lab` is what each sees of it. Its kernels fork their engines from one process."""
    with shared.start(), fork_server.used():
        server = Lab(tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("lab"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def lab(server: Lab, request: pytest.FixtureRequest) -> Lab:
    """The server, with the notebooks of this file in a folder of their own."""
    return server.in_folder(request.path.stem)


@pytest.fixture
def open_notebook(lab: Lab, browser: BrowserContext) -> Iterator[Open]:
    """The kernel of each notebook is ended after the test."""
    yield from _opened(lab, browser)


@pytest.fixture(scope="module")
def open_shared(lab: Lab, browser: BrowserContext) -> Iterator[Open]:
    """The same for a notebook that several tests of a file use: a page and a cluster take seconds to start."""
    yield from _opened(lab, browser)


def _opened(lab: Lab, browser: BrowserContext) -> Iterator[Open]:
    opened: list[NotebookPage] = []

    def open_one(name: str, *cells: str) -> NotebookPage:
        if cells:
            NotebookPage.write(lab.directory / name, *cells)
        opened.append(NotebookPage(browser.new_page(), lab, name))
        return opened[-1]

    yield open_one
    for notebook in opened:
        notebook.shut_down()
        notebook.close()


@pytest.fixture
def picture() -> Picture:
    """Saves what a cell shows as a picture to look at; `make screenshot` renews those that the docs show."""

    def save(notebook: NotebookPage, cell: int, name: str) -> None:
        folder = DOCS if (DOCS / f"{name}.png").exists() else ARTIFACTS
        folder.mkdir(parents=True, exist_ok=True)
        notebook.picture(cell, folder / f"{name}.png")

    return save
