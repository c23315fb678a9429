"""A kernel whose cells are executed one by one, as a notebook's are."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from traitlets.config import Config

__all__ = ["ANSI", "Notebook", "with_cluster", "without_ports"]


ANSI = re.compile(r"\x1b\[[0-9;]*m")


def without_ports(folder: Path) -> Config:
    """For a NotebookClient whose kernel has sockets in ``folder``: another process may take a port that was free."""
    return Config(KernelManager={"transport": "ipc", "ip": str(folder / "kernel")})


class Notebook:
    """A kernel whose cells are executed one by one."""

    def __init__(self, directory: Path) -> None:
        self._sockets = TemporaryDirectory(prefix="kernel-")  # sockets have short names
        self._stacks = Path(self._sockets.name, "stacks")
        self.document = nbformat.v4.new_notebook()
        # Outputs that come late, because the machine is busy, count too.
        self.client = NotebookClient(
            self.document,
            timeout=200,
            iopub_timeout=60,
            resources={"metadata": {"path": str(directory)}},
            config=without_ports(Path(self._sockets.name)),
        )
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self.client.create_kernel_manager()
        await self.client.async_start_new_kernel()
        await self.client.async_start_new_kernel_client()
        written = f"open({str(self._stacks)!r}, 'w')"
        code = f"__import__('faulthandler').register(__import__('signal').SIGUSR2, {written})"
        self.client.kc.execute(code, silent=True)

    def run(self, source: str, interrupt_when: Callable[[], bool] | None = None) -> list[dict[str, Any]]:
        """Execute a cell and return its outputs; its error, if it has one, is among them.

        The kernel is interrupted as soon as ``interrupt_when`` holds, and again where it had not begun with the cell.
        """
        cell = nbformat.v4.new_code_cell(source)
        self.document.cells.append(cell)
        interrupt = self.loop.create_task(self._interrupt(interrupt_when)) if interrupt_when else None
        index = len(self.document.cells) - 1
        try:
            with contextlib.suppress(CellExecutionError):
                self.loop.run_until_complete(self.client.async_execute_cell(cell, index))
        except CellTimeoutError:
            pytest.fail(f"the cell did not end:\n{source}\n{cell.outputs}\n{self._where()}", pytrace=False)
        if interrupt is not None:
            interrupt.cancel()
        return [output for output in cell.outputs if output.get("data") != {"text/html": "", "text/plain": ""}]

    def text(self, source: str) -> str:
        """The text of a cell's outputs, streams and results; fails when it has an error."""
        outputs = self.run(source)
        assert not [output for output in outputs if output["output_type"] == "error"], outputs
        return "".join(output.get("text") or output["data"]["text/plain"] for output in outputs)

    def error(self, source: str, interrupt_when: Callable[[], bool] | None = None) -> tuple[str, str]:
        """The name of a cell's error and what the notebook shows of it, without colours."""
        errors = [o for o in self.run(source, interrupt_when) if o["output_type"] == "error"]
        assert len(errors) == 1, errors
        return errors[0]["ename"], ANSI.sub("", "\n".join(errors[0]["traceback"]))

    def talk(self, source: str, *typed: str) -> tuple[list[str], str, dict[str, Any]]:
        """Execute a cell that asks questions: the prompts, what it printed, and the kernel's reply.

        Once all of ``typed`` is used up, the kernel is interrupted at the next question.
        """
        asked: list[str] = []
        printed: list[str] = []
        answers = iter(typed)

        def answer(message: dict[str, Any]) -> None:
            asked.append(message["content"]["prompt"])
            line = next(answers, None)
            if line is None:
                os.kill(self.pid, signal.SIGINT)
            else:
                self.client.kc.input(line)

        def take(message: dict[str, Any]) -> None:
            printed.append(message["content"].get("text", ""))

        reply = self.loop.run_until_complete(
            self.client.kc._async_execute_interactive(
                source, allow_stdin=True, stdin_hook=answer, output_hook=take, timeout=60
            )
        )
        return asked, "".join(printed), reply["content"]

    def begin(self, source: str) -> str:
        """Have the kernel execute a cell, and return the number of this request."""
        return str(self.client.kc.execute(source))

    def printed_below(self, request: str, until: str, seconds: float = 60.0) -> str:
        """What the cell of a `begin` has printed below itself, also when it had ended, up to the text ``until``."""
        printed = ""

        async def read() -> None:
            nonlocal printed
            while until not in printed:
                message = await self.client.kc._async_get_iopub_msg()
                if message["parent_header"].get("msg_id") == request:
                    content = message["content"]
                    printed += content.get("text", "") + content.get("data", {}).get("text/plain", "")

        try:
            self.loop.run_until_complete(asyncio.wait_for(read(), seconds))
        except asyncio.TimeoutError:
            pytest.fail(f"no {until!r} below the cell: {printed}")
        return printed

    def inspect(self, source: str) -> str:
        """What the kernel shows when somebody presses Shift+Tab at the end of ``source``; empty for nothing."""
        reply = self.loop.run_until_complete(self.client.kc.inspect(source, reply=True, timeout=200))
        content = reply["content"]
        return ANSI.sub("", content["data"].get("text/plain", "")) if content["found"] else ""

    def complete(self, source: str) -> list[str]:
        """What the kernel offers at the end of ``source`` when somebody presses Tab there."""
        reply = self.loop.run_until_complete(self.client.kc.complete(source, reply=True, timeout=200))
        return list(reply["content"]["matches"])

    async def _interrupt(self, when: Callable[[], bool]) -> None:
        while not when():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)  # into what has begun
        while True:
            os.kill(self.pid, signal.SIGINT)
            await asyncio.sleep(10.0)  # an idle kernel ignores it

    def clean(self) -> None:
        """End the cell and the runs that are in progress, and the variables of the ranks, if there are any."""
        os.kill(self.pid, signal.SIGINT)  # an idle kernel ignores it
        self.run("%ring stop --runs")
        if [output for output in self.run("%%ringtrain\n%reset -f") if output["output_type"] == "error"]:
            self.run("%ring restart")

    def _where(self) -> str:
        """The stacks of the kernel, and of its ranks, which write theirs into files beside those of their output."""
        written = {self._stacks}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                output = Path(os.readlink(process / "fd" / "2"))
                if f"/{self.pid}-" in str(output) and output.name.startswith("rank-"):
                    os.kill(int(process.name), signal.SIGUSR1)
                    written.add(output.with_suffix(".log"))
        os.kill(self.pid, signal.SIGUSR2)
        time.sleep(3.0)
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-6000:]}" for path in sorted(written))

    @property
    def pid(self) -> int:
        """The kernel's process."""
        return int(self.client.km.provisioner.pid)

    def close(self) -> None:
        self.loop.run_until_complete(self.client._async_cleanup_kernel())
        self.loop.close()
        self._sockets.cleanup()


def with_cluster(directory: Path) -> Notebook:
    """A kernel in ``directory`` that has started a cluster of two engines."""
    notebook = Notebook(directory)
    notebook.run("%load_ext ring_notebook\n%ring start -n 2")
    return notebook
