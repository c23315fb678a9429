"""The second user, and records in a folder of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from attack.second_user import Stranger, stranger
from ring_notebook.config import config
from ring_notebook.notebook.cluster.cluster import Cluster


@pytest.fixture(scope="module")
def intruder() -> Iterator[Stranger]:
    """Another user of this machine; tests that ask for it are skipped, and said to be, without root."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED against a second user of the machine: needs root")
    with stranger() as started:
        yield started


@contextlib.contextmanager
def records_in(folder: Path) -> Iterator[Path]:
    """A ``.ring`` in a folder that everybody may enter, under a umask that hides nothing."""
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RING_RUNS_DIR", str(folder / ".ring" / "runs"))
        config.cache_clear()
        before = os.umask(0)
        yield folder / ".ring"
        os.umask(before)
    config.cache_clear()


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Path]:
    """Records of one test."""
    with records_in(tmp_path) as folder:
        yield folder


@pytest.fixture(scope="module")
def shared_records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Those of `cluster`."""
    with records_in(tmp_path_factory.mktemp("shared")) as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(shared_records: Path) -> Iterator[Cluster]:
    """Two engines for the tests of a module that leave them as they are."""
    with Cluster(2) as started:
        yield started
