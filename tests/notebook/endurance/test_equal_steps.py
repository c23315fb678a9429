"""Whatever ends a training cell, all ranks have made the same optimizer steps when the next one begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook.endurance.equal_steps import ENDS, TRAININGS, Training
from ring_notebook.notebook.cluster.cluster import Cluster

LIVING = [end for end in ENDS if end != "is killed"]


@pytest.fixture(scope="module")
def cluster(_own_records: Path) -> Iterator[Cluster]:
    """Three engines: one may fail while the second is ahead of the third."""
    with Cluster(3) as started:
        yield started


@pytest.fixture(autouse=True)
def _fresh(cluster: Cluster) -> None:
    cluster.run("%reset -f").wait()


@pytest.mark.parametrize("name", TRAININGS)
def test_all_ranks_have_made_the_same_steps(cluster: Cluster, name: str) -> None:
    training = Training(cluster, name)
    for number in range(6):
        training.run(LIVING[number % len(LIVING)])
        training.check()
    training.run(steps=2)
    training.check()
    training.check_against_one_process()
