"""The second user, and records in a folder of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from attack.second_user import Stranger, stranger
from ring_notebook.config import config


@pytest.fixture(scope="module")
def intruder() -> Iterator[Stranger]:
    """Another user of this machine; tests that ask for it are skipped, and said to be, without root."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED against a second user of the machine: needs root")
    with stranger() as started:
        yield started


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ``.ring`` in a folder that everybody may enter, under a umask that hides nothing."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    monkeypatch.setenv("RING_RUNS_DIR", str(tmp_path / ".ring" / "runs"))
    config.cache_clear()
    before = os.umask(0)
    yield tmp_path / ".ring"
    os.umask(before)
    monkeypatch.undo()
    config.cache_clear()
