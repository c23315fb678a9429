"""The environment that the engines of a cluster start with."""

from __future__ import annotations

import pytest

from ring_notebook.launch.launchers.find_launcher import find_launcher
from ring_notebook.notebook.cluster.processes import engines


def test_engines_inherit_nothing_of_the_job_whose_rank_the_kernel_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("KEPT", "1")
    _, environment = engines(find_launcher(), 2, (), {})
    assert "KEPT" in environment
    assert not environment.keys() & {"PMI_RANK", "OMPI_COMM_WORLD_SIZE"}
