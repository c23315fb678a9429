"""The command that starts a cluster's engines."""

from __future__ import annotations

import os

import pytest

from harness.programs import ran
from ring_notebook.notebook.cluster.processes import EngineLauncher


def test_engines_inherit_nothing_of_the_job_whose_rank_the_kernel_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("KEPT", "1")
    command = EngineLauncher(n=2, keep=True).find_args()
    options = command[: next(index for index, word in enumerate(command) if not word.startswith(("env", "--unset=")))]
    shown = ran([*options, "env"], env=os.environ, check=True).stdout
    names = {line.partition("=")[0] for line in shown.splitlines()}
    assert "KEPT" in names
    assert not names & {"PMI_RANK", "OMPI_COMM_WORLD_SIZE"}
