"""A folder with the ``.ring`` of another user: the extension loads, and what needs the folder says whose it is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.config import config
from ring_notebook.errors import ClusterError
from ring_notebook.notebook.cluster import cluster_folders
from ring_notebook.notebook.magics.ipython_magics import register

NOBODY = 54321


@pytest.fixture(params=[1, 0], ids=["another user's", "root's"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, InteractiveShell]]:
    """The user whose ``.ring`` is in the current folder, which this process, as another user, may write to; a shell."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED with another user's folder: needs root")
    monkeypatch.delenv("RING_RUNS_DIR", raising=False)
    config.cache_clear()
    shell = InteractiveShell()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / ".ring").mkdir(mode=0o700)
        os.chown(folder / ".ring", request.param, request.param)
        monkeypatch.chdir(folder)
        os.seteuid(NOBODY)
        try:
            yield request.param, shell
        finally:
            os.seteuid(0)
            monkeypatch.undo()
    config.cache_clear()


def test_the_extension_loads_and_a_start_says_whose_the_folder_is(place: tuple[int, InteractiveShell]) -> None:
    owner, shell = place
    register(shell)
    assert list(cluster_folders.running()) == []
    whose = {0: r"cannot make .*\(.*\.ring belongs to root\)", 1: r"\.ring belongs to another user, daemon; remove it"}
    with pytest.raises(ClusterError, match=whose[owner]):
        cluster_folders.new_directory()
