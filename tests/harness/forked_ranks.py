"""Forks the ranks of jobs and clusters from a process that has imported PyTorch, for tests that request it.

The import costs a rank two to four seconds of processor time. Tests of how ranks start do not use it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator, Sequence

import pytest

from harness.leftovers import TOKEN
from ring_notebook.launch.supervisor.fork_server import start_server
from ring_notebook.launch.supervisor.forked_rank import ADDRESS

__all__ = ["MODULES", "ForkServer", "serve_in_background"]

MODULES = (
    "torch",
    "torch._dynamo",
    "numpy",
    "ring_notebook.torch",
    "IPython",
    "ipykernel.ipkernel",
    "ipykernel.zmqshell",
    "ring_notebook.engine.setup",
    "ring_notebook.engine.runner",
)
"""Imports of most ranks; the second is needed to make an optimizer. A user's engines inherit the last two, too.

None may remember the process or folder of its import. ipyparallel's programs are not here: they remember the folder.
"""


class ForkServer:
    """The process, started at its first use. It outlives test files and does not count as a leftover."""

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        self._address = f"@test-{uuid.uuid4().hex}"
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """In the block, supervisors that this process starts fork their ranks from it."""
        if self._process is None:
            environment = {name: value for name, value in os.environ.items() if name != TOKEN}
            self._process = start_server(self._address, self._modules, environment)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(ADDRESS, self._address)
            yield

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def serve_in_background(address: str) -> None:
    """Return when a server listens at ``address``. The server ends when a child of this process does."""
    ready, written = os.pipe()
    if os.fork():
        os.read(ready, 1)
        return
    os.setsid()
    start_server(address, MODULES, os.environ)
    os.write(written, b"1")
    signal.pause()
