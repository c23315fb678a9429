"""One cluster per module of tests, records in a folder of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook.kernel import Notebook
from ring_notebook.config import config
from ring_notebook.notebook.cluster.cluster import Cluster


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


@pytest.fixture(scope="module")
def cluster(_own_records: Path) -> Iterator[Cluster]:
    """Two engines for all tests of a module; a test that ends them restarts them."""
    with Cluster(2) as started:
        yield started


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A kernel with a cluster of two engines; a module that needs another one has a fixture of its own."""
    started = Notebook(tmp_path_factory.mktemp("notebook"))
    started.run("%load_ext ring_notebook\n%ring start -n 2")
    yield started
    started.close()
