"""A rank that raises, is killed, stopped or disagrees in torch's own trainings: no cell hangs, the next one trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook.endurance.steps_that_end import ENDS, TRAININGS, end_and_train
from ring_notebook.notebook.cluster.cluster import Cluster

TIMES = 5
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(_own_records: Path) -> Iterator[Cluster]:
    """Three engines: some of them wait for a dead one, and some for one that has failed because of it."""
    with Cluster(3) as started:
        yield started


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("end", ENDS)
def test_nobody_hangs_and_the_next_cell_trains(cluster: Cluster, name: str, end: str) -> None:
    for number in range(TIMES):
        end_and_train(cluster, TRAININGS[name], end, number)
