"""Runs that end badly, one after the other on one cluster: every next one trains, and nothing piles up."""

from __future__ import annotations

from typing import Any

import pytest

from harness.waiting import LIMIT, until
from notebook.endurance.endure import ENDINGS, TRAINS, endure, holdings
from ring_notebook.notebook.cluster.cluster import Cluster

SURVIVED = [name for name, ending in ENDINGS.items() if not ending.deadly]


def hold_no_more(cluster: Cluster, before: dict[str, tuple[int, int, int]], mib: int) -> None:
    """No process holds much more than ``before`` of memory, descriptors and threads, once those of the last run end."""

    def excess() -> dict[str, Any]:
        return {
            process: (now, before[process])
            for process, now in holdings(cluster).items()
            if any(has > had + few for has, had, few in zip(now, before[process], (mib, 2, 1), strict=True))
        }

    until(lambda: not excess(), LIMIT, excess)


@pytest.mark.slow
def test_each_ends_soon_and_many_hold_no_more_than_a_few(cluster: Cluster) -> None:
    cluster.run(TRAINS).wait()
    for name in SURVIVED:
        endure(cluster, name)
    before = holdings(cluster)
    for name in SURVIVED:
        endure(cluster, name)
    hold_no_more(cluster, before, mib=8)


@pytest.mark.slow
def test_many_runs_of_one_cell(cluster: Cluster) -> None:
    cell = "import torch\nkept = torch.ones(250_000)\nfor i in range(5): ring.log(loss=i)"
    for _ in range(20):
        cluster.run(cell).wait()
    before = holdings(cluster)
    for _ in range(60):
        cluster.run(cell).wait()
    hold_no_more(cluster, before, mib=16)
