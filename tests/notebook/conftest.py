"""A cluster and a kernel that files of tests share, and records in a folder of each file's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.forked_ranks import ForkServer
from harness.leftovers import SharedProcesses
from harness.numpy_framework import installed
from notebook.kernel import Notebook, with_cluster
from ring_notebook.config import config
from ring_notebook.notebook.cluster.cluster import Cluster


@pytest.fixture(scope="session", autouse=True)
def _forked(fork_server: ForkServer, numpy_site: Path) -> Iterator[None]:
    """All clusters of these tests fork their ranks from one process, except in `test_lifecycle.py`.

    Those `without_torch` too: it has the path that they need.
    """
    with installed(numpy_site), fork_server.used():
        yield


@pytest.fixture(scope="module", autouse=True)
def _own_records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs and clusters of these tests leave nothing in the working directory."""
    directory = tmp_path_factory.mktemp("ring") / "runs"
    before = os.environ.get("RING_RUNS_DIR")
    os.environ["RING_RUNS_DIR"] = str(directory)
    config.cache_clear()
    yield directory
    if before is None:
        del os.environ["RING_RUNS_DIR"]
    else:
        os.environ["RING_RUNS_DIR"] = before
    config.cache_clear()


class SharedCluster(Cluster):
    """Whose engines `Leftovers` of one file do not see, also those of a restart."""

    def __init__(self, n: int, processes: SharedProcesses) -> None:
        super().__init__(n)
        self._shared_processes = processes

    def start(self) -> Cluster:
        with self._shared_processes.start():
            return super().start()


@pytest.fixture(scope="package")
def _shared() -> Iterator[SharedProcesses]:
    """What the files of this folder share; nothing of it is left at their end."""
    with SharedProcesses() as processes:
        yield processes


@pytest.fixture(scope="package")
def _shared_cluster(_shared: SharedProcesses) -> Iterator[Cluster]:
    with SharedCluster(2, _shared) as started:
        yield started


@pytest.fixture(scope="module")
def cluster(_own_records: Path, _shared_cluster: Cluster) -> Iterator[Cluster]:
    """Two engines, without variables; a test that ends them restarts them."""
    yield _shared_cluster
    _shared_cluster.run("%reset -f").wait()


@pytest.fixture(scope="package")
def _shared_notebook(tmp_path_factory: pytest.TempPathFactory, _shared: SharedProcesses) -> Iterator[Notebook]:
    with _shared.start(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RING_RUNS_DIR", str(tmp_path_factory.mktemp("ring") / "runs"))
        started = with_cluster(tmp_path_factory.mktemp("notebook"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def notebook(_shared_notebook: Notebook) -> Iterator[Notebook]:
    """A kernel with a cluster of two engines, without variables or set-up cells.

    A file that leaves more behind has a fixture of its own.
    """
    yield _shared_notebook
    _shared_notebook.text("%%ringtrain\n%reset -f")
    _shared_notebook.text("get_ipython().magics_manager.registry['RingMagics']._session.setup = []")
