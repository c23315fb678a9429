"""Drives a real JupyterLab in a real browser, as a person would."""

from __future__ import annotations

import base64
import copy
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import nbformat
from playwright.sync_api import Locator, Page

from harness.waiting import LIMIT

__all__ = ["ARTIFACTS", "Lab", "NotebookPage", "Open", "Picture"]

ARTIFACTS = Path(__file__).with_name("artifacts")
# Live charts take a new width a moment after their places.
FOLLOWED = """[...document.querySelectorAll("[_echarts_instance_]")].every(
    place => Math.abs(place.clientWidth - place.firstElementChild.clientWidth) < 1)"""


class Lab:
    """A JupyterLab server over ``directory``, with its own runtime files and settings."""

    def __init__(self, directory: Path, private: Path, theme: str = "JupyterLab Light") -> None:
        self.directory = self._root = directory
        self._runtime = TemporaryDirectory(prefix="lab-")  # sockets of kernels have short names
        settings = private / "settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True)
        (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
        (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))
        # JUPYTER_DATA_DIR stays: the widgets' front ends are found there.
        environment = {
            **os.environ,
            "JUPYTER_RUNTIME_DIR": self._runtime.name,
            "JUPYTER_CONFIG_DIR": str(private / "config"),
            "JUPYTERLAB_SETTINGS_DIR": str(private / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(private / "workspaces"),
            "RING_STALL_WARNING": "2",
        }
        self._log = private / "lab.log"
        command = [sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", "--ip", "127.0.0.1"]
        command += ["--KernelManager.transport=ipc", f"--ServerApp.root_dir={directory}", "--ServerApp.port_retries=0"]
        command += ["--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True"]
        for _ in range(3):  # another process may take the port before the server does
            if self._is_started([*command, "--port"], environment):
                return
        self._runtime.cleanup()
        raise RuntimeError(f"JupyterLab did not start:\n{self._log.read_text()}")

    def _is_started(self, command: list[str], environment: dict[str, str]) -> bool:
        """Start the server at a free port; whether it is up."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, str(port)], env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + LIMIT
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.url}/api", timeout=10).close()
            except (OSError, HTTPException):
                time.sleep(0.1)
            else:
                return True
        self._end()
        return False

    def in_folder(self, name: str) -> Lab:
        """The same server, with notebooks in a folder below its own."""
        other = copy.copy(self)
        other.directory = self._root / name
        other.directory.mkdir()
        return other

    def address(self, notebook: str) -> str:
        """Of a notebook's page."""
        return f"{self.url}/doc/tree/{(self.directory / notebook).relative_to(self._root)}"

    def close(self) -> None:
        """End the server and with it its kernels."""
        self._end()
        self._runtime.cleanup()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class NotebookPage:
    """One notebook open in a browser tab. Cells are counted from 0, code cells only."""

    def __init__(self, page: Page, lab: Lab, name: str) -> None:
        self.page = page
        self.path = lab.directory / name
        self._lab = lab
        self._screen = page.context.new_cdp_session(page)
        page.goto(f"{lab.address(name)}?reset")
        page.locator(".jp-Notebook .jp-Cell").first.wait_for()

    @staticmethod
    def write(path: Path, *cells: str) -> None:
        """A new notebook file with these code cells."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, path)

    def cell(self, index: int) -> Locator:
        """A code cell."""
        return self.page.locator(".jp-CodeCell").nth(index)

    def output(self, index: int) -> Locator:
        """All that a code cell shows."""
        return self.cell(index).locator(".jp-OutputArea").first

    def size(self, width: int, height: int = 1400, scale: int = 2) -> None:
        """Give the window this size in pixels of the page, and the screen this scale; live charts have it too."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self._screen.send("Emulation.setDeviceMetricsOverride", metrics)
        self.until(lambda: self.page.evaluate("[innerWidth, devicePixelRatio]") == [width, scale])
        self.until(lambda: bool(self.page.evaluate(FOLLOWED)))

    def picture(self, index: int, path: Path) -> None:
        """Save what a code cell shows. Playwright's own pictures would give the window its first size again."""
        width, height, scale = self.page.evaluate("[innerWidth, innerHeight, devicePixelRatio]")
        output = self.output(index)
        needed = output.evaluate("element => Math.ceil(element.getBoundingClientRect().height)") + 300
        resized = needed > height or scale > 1  # the screen of this session draws at a scale that it was given itself
        if resized:
            self.size(width, max(needed, height), scale)
        output.evaluate("element => element.scrollIntoView({block: 'start'})")
        self.page.wait_for_timeout(100)
        shown = {"format": "png", "clip": {**output.bounding_box(), "scale": 1}}  # type: ignore[dict-item]
        path.write_bytes(base64.b64decode(self._screen.send("Page.captureScreenshot", shown)["data"]))
        if resized:
            self.size(width, height, scale)

    def run(self, index: int) -> None:
        """Start a cell; returns when it is in progress."""
        self.page.locator(".jp-StatusBar-TextItem", has_text="| Idle").wait_for()
        before = self._prompt(index)
        self.until(lambda: self._prompt(index) != before or self._press(index))

    def wait_ended(self, index: int, seconds: float = LIMIT) -> None:
        """Wait until a cell that was started has its number."""
        self.until(lambda: bool(re.fullmatch(r"\[\d+\]:?", self._prompt(index))) or self._dropped(index), seconds)

    def complete(self, *indices: int) -> None:
        """Run cells, one after another, each to its end."""
        for index in indices:
            self.run(index)
            self.wait_ended(index)

    def _dropped(self, index: int) -> bool:
        """False. JupyterLab drops a cell, also one in progress, while its kernel connects: then press again."""
        return re.fullmatch(r"\[\s*\]:?", self._prompt(index)) is not None and self._press(index)

    def _press(self, index: int) -> bool:
        """Press the keys that start a cell, and wait a second for an answer. Returns False."""
        self.cell(index).locator(".jp-InputArea-editor").click()
        before = self._prompt(index)
        self.page.keyboard.press("Control+Enter")
        again = time.monotonic() + 1
        while self._prompt(index) == before and time.monotonic() < again:
            self.page.wait_for_timeout(50)
        return False

    def _prompt(self, index: int) -> str:
        return self.cell(index).locator(".jp-InputArea-prompt").inner_text().strip()

    def until(self, holds: Callable[[], bool], seconds: float = LIMIT) -> None:
        """Wait until ``holds`` does. Raises AssertionError when it does not in time, and takes a picture."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                picture = ARTIFACTS / f"failure-{self.path.stem}.png"
                self.page.screenshot(path=picture)
                raise AssertionError(f"not so after {seconds} s; see {picture}")
            self.page.wait_for_timeout(100)

    def save(self) -> nbformat.NotebookNode:
        """Save with the keyboard, wait until it is on disk, and read it."""
        before = self.path.stat().st_mtime_ns
        self.page.keyboard.press("Control+s")
        self.until(lambda: self.path.stat().st_mtime_ns > before and self._is_whole())
        return nbformat.read(self.path, as_version=4)

    def _is_whole(self) -> bool:
        """Whether the server has written all of the file."""
        try:
            json.loads(self.path.read_text())
        except json.JSONDecodeError:
            return False
        return True

    def close(self) -> None:
        """Close the tab; the kernel lives on."""
        self.page.close()

    def interrupt(self) -> None:
        """Interrupt the kernel, as its menu does."""
        for kernel in self._kernels():
            self.page.request.post(f"{self._lab.url}/api/kernels/{kernel}/interrupt")

    def restart(self) -> None:
        """Restart the kernel, as its menu does."""
        self.cell(0).locator(".jp-InputArea-prompt").click()
        for key in ("Escape", "0", "0"):
            self.page.keyboard.press(key)
        self.page.locator(".jp-Dialog button.jp-mod-accept").click()
        self.page.locator(".jp-StatusBar-TextItem", has_text="| Idle").wait_for()

    def shut_down(self) -> None:
        """End the notebook's kernel, and with it its cluster."""
        if self.page.is_closed():
            return
        self.page.goto("about:blank")
        for kernel in self._kernels():
            self.page.request.delete(f"{self._lab.url}/api/kernels/{kernel}")

    def _kernels(self) -> list[str]:
        return [kernel["id"] for kernel in self.page.request.get(f"{self._lab.url}/api/kernels").json()]


class Open(Protocol):
    """Opens a notebook of the lab's folder in a tab; one with these code cells, where any are given."""

    def __call__(self, name: str, *cells: str) -> NotebookPage: ...


Picture = Callable[[NotebookPage, int, str], None]
"""Saves what a cell shows as a picture of that name."""
