"""Has the ranks of jobs and clusters forked from a process that has imported PyTorch, in folders that ask for it.

To import it takes a rank two to four seconds of a processor. Tests of how ranks start keep interpreters of their own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.leftovers import TOKEN
from ring_notebook.launch.supervisor.fork_server import start_server
from ring_notebook.launch.supervisor.forked_rank import ADDRESS
from ring_notebook.rank.preload import preloaded

__all__ = ["ForkServer"]

_MODULES = (
    "torch",
    "torch._dynamo",
    "numpy",
    "ring_notebook.torch",
    "IPython",
    "ipykernel.ipkernel",
    "ipykernel.zmqshell",
)
"""What most ranks import, the second when they make an optimizer.

None remembers the process or the folder in which it was imported. ipyparallel does: the folder is its engines' own.
"""


class ForkServer:
    """The process, started when it is first used. It lives on between files of tests, whose leftovers it is none of."""

    def __init__(self, folder: Path) -> None:
        self._address = folder / "socket"
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Within the block, supervisors that this process starts have it fork their ranks."""
        if self._process is None:
            environment = {name: value for name, value in os.environ.items() if name != TOKEN}
            self._process = start_server(self._address, _MODULES, environment | preloaded(environment))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(ADDRESS, str(self._address))
            yield

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
