"""Tests on two hosts: they need root and iproute2, and say so where these are missing."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.leftovers import TOKEN
from harness.numpy_framework import installed
from harness.two_hosts import TwoHosts, hosts_or_skip
from ring_notebook.launch.supervisor.forked_rank import ADDRESS

SERVER = "@ring-hosts"
"""The address of a host's fork server. Each network namespace has such names of its own."""


@pytest.fixture(scope="session")
def hosts() -> Iterator[TwoHosts]:
    """Two hosts joined by a link of 1 Gbit/s."""
    yield from hosts_or_skip()


@pytest.fixture(scope="session")
def _servers(hosts: TwoHosts, numpy_site: Path) -> str:
    """Start the fork server of each host; returns the PYTHONPATH of its ranks, in which is the package of numpy."""
    code = f"from harness.forked_ranks import serve_in_background; serve_in_background({SERVER!r})"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        patch.delenv(TOKEN, raising=False)  # they live as long as the hosts
        with installed(numpy_site):
            for name in hosts.names:
                command = [str(hosts.folder / "launcher"), name, shlex.join([sys.executable, "-c", code])]
                subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
            return os.environ["PYTHONPATH"]


@pytest.fixture(scope="module")
def forked_on_hosts(_servers: str) -> Iterator[None]:
    """The ranks that this file starts on the hosts are forks of a process that has imported PyTorch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", _servers)
        patch.setenv(ADDRESS, SERVER)
        yield
