"""Runs that end badly, one after the other on one cluster: every next one trains, and nothing piles up."""

from __future__ import annotations

from notebook.endure import ENDINGS, TRAINS, endure, holdings
from ring_notebook.notebook.cluster.cluster import Cluster

SURVIVED = [name for name, ending in ENDINGS.items() if not ending.deadly]


def test_ends_soon_and_trains_after_each(cluster: Cluster) -> None:
    cluster.run(TRAINS).wait()
    for name in SURVIVED:
        endure(cluster, name)


def test_many_runs_hold_no_more_than_a_few(cluster: Cluster) -> None:
    for name in SURVIVED:
        endure(cluster, name)
    before = holdings(cluster)
    for _ in range(3):
        for name in SURVIVED:
            endure(cluster, name)
    after = holdings(cluster)
    for process, (memory, descriptors, threads) in after.items():
        assert memory <= before[process][0] + 8, process
        assert descriptors <= before[process][1] + 2, process
        assert threads <= before[process][2] + 1, process


def test_two_hundred_runs_of_one_cell(cluster: Cluster) -> None:
    cell = "import torch\nkept = torch.ones(250_000)\nfor i in range(5): ring.log(loss=i)"
    for _ in range(20):
        cluster.run(cell).wait()
    before = holdings(cluster)
    for _ in range(180):
        cluster.run(cell).wait()
    for process, (memory, descriptors, threads) in holdings(cluster).items():
        assert memory <= before[process][0] + 16, process
        assert descriptors <= before[process][1] + 2, process
        assert threads <= before[process][2] + 1, process
