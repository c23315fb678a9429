"""The environment that engines start with, and what they import before they are forked, hold for each of them."""

from __future__ import annotations

import sys

import pytest

from harness.programs import ran
from ring_notebook.errors import ClusterError
from ring_notebook.launch.launchers.find_launcher import find_launcher
from ring_notebook.launch.launchers.hosts import parse_hosts
from ring_notebook.notebook.cluster import processes
from ring_notebook.notebook.cluster.processes import engines, require_processes

IMPORT = """
import os, sys, traceback
from importlib import import_module
from ring_notebook.notebook.cluster.engine_forks import _OF_AN_ENGINE

own, asked = os.getpid, []

def getpid():
    files = [frame.filename for frame in traceback.extract_stack(limit=3)[:-1]]
    asked.extend(file for file in files if "ring_notebook" in file)
    return own()

os.getpid = getpid
for module in _OF_AN_ENGINE:
    import_module(module)
print(asked)
"""


def test_their_imports_remember_no_process() -> None:
    """It would be that of the process that forks them."""
    done = ran([sys.executable, "-c", IMPORT], check=True)
    assert done.stdout == "[]\n"


def test_engines_inherit_nothing_of_the_job_whose_rank_the_kernel_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("KEPT", "1")
    _, environment = engines(find_launcher(), 2, (), {})
    assert "KEPT" in environment
    assert not environment.keys() & {"PMI_RANK", "OMPI_COMM_WORLD_SIZE"}


@pytest.mark.parametrize(
    ("n", "hosts", "needed"),
    [
        (128, "a:64,b:64", ""),  # of a login node that starts none itself
        (128, "localhost:60,b:68", "128 engines, 60 of them on this host, needs about 868"),
        (128, "127.0.1.1:128", "128 engines needs about 1820"),  # places that Ray lends on this machine
        (128, "", "128 engines needs about 1816"),
        (1000, ",".join(f"n{number}" for number in range(1000)), "1000 engines, 0 of them on this host, needs about"),
    ],
)
def test_only_processes_of_this_host_count(n: int, hosts: str, needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "processes_allowed", lambda: 800)
    if not needed:
        require_processes(n, parse_hosts(hosts))
        return
    with pytest.raises(ClusterError, match=f"a cluster of {needed}.* processes and threads, 800 are allowed here"):
        require_processes(n, parse_hosts(hosts))
