"""One Slurm for all tests of this folder; none of them leaves a process or a job in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.slurm import Slurm, slurm


@pytest.fixture(scope="session", name="system")
def _system() -> Iterator[Slurm]:
    with slurm() as system:
        yield system


@pytest.fixture(autouse=True)
def _nothing_left(system: Slurm) -> Iterator[None]:
    yield
    system.wait_until_nothing_is_left()
