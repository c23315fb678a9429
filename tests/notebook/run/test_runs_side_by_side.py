"""Ranks that a run leaves idle take another cell meanwhile, from the same notebook and from the next one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.waiting import until
from ring_notebook.errors import ClusterError
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.run.run import Run

LONG = "import time\nat = 0\nwhile True:\n    ring.barrier()\n    at += 1\n    ring.log(at=at)\n    time.sleep(0.01)"
SUM = "import numpy\ntotal = [float(ring.allreduce(numpy.ones(1), op=ring.Sum)[0]) for i in range(50)]"
pytestmark = pytest.mark.usefixtures("without_torch")


@pytest.fixture
def cluster(_own_records: Path) -> Iterator[Cluster]:
    with Cluster(4, keep=True) as started:
        yield started


def training(run: Run, beyond: int = 0) -> int:
    """The step of a run whose two ranks take steps, when it is beyond this one."""
    until(lambda: min(rank.step for rank in run.view.ranks) > beyond and all(rank.last for rank in run.view.ranks))
    return min(rank.step for rank in run.view.ranks)


def stopped(run: Run) -> bool:
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    return run.status == "interrupted"


def test_two_runs_on_ranks_of_their_own(cluster: Cluster) -> None:
    long = cluster.run(LONG, ranks=[3, 1], name="long")
    training(long)
    short = cluster.run(SUM, ranks=[0, 2]).wait()
    assert short.status == "ok"
    assert cluster.status()[1].run == cluster.status()[3].run == long.log.run
    assert [cluster.status()[rank].state for rank in (0, 2)] == ["idle", "idle"]
    for ranks in (None, [1], [2, 3]):
        with pytest.raises(ClusterError, match=r"run long is in progress on ranks 1, 3 of the cluster \(rank 0 "):
            cluster.run("pass", ranks=ranks)
    with pytest.raises(ClusterError, match="run long is in progress"):
        cluster.pull("total", 1)
    assert cluster.pull("total", 0) == [2.0] * 50
    other = cluster.run(LONG, ranks=[0, 2], name="other")
    training(other)
    at = training(long)
    other.stop()
    assert stopped(other)
    training(long, at)

    # Who attaches finds both.
    again = cluster.run(LONG, ranks=[2], name="again")
    until(lambda: bool(again.view.ranks[0].last))
    cluster.runs.leave()
    follower = Cluster.attach()
    assert [run.log.name for run in follower.runs.in_progress] == ["long", "again"]
    assert follower.run(SUM, ranks=[0]).wait().status == "ok"
    for run in follower.runs.in_progress:
        run.stop()
        assert stopped(run)
    assert follower.run(SUM).wait().status == "ok"
    assert follower.pull("total", 3) == [4.0] * 50


@pytest.mark.slow
def test_a_death_leaves_the_run_of_the_others(cluster: Cluster) -> None:
    dies = cluster.run(LONG, ranks=[0, 1])
    lives = cluster.run(LONG, ranks=[2, 3])
    training(dies)
    at = training(lives)
    os.kill(cluster.status()[1].pid, signal.SIGKILL)
    with pytest.raises(ClusterError, match=r"rank 1 on .* was killed by SIGKILL"):
        dies.wait()
    training(lives, at)
    with pytest.raises(ClusterError, match="is in progress on ranks 2-3"):
        cluster.heal()
    lives.stop()
    assert stopped(lives)
    assert cluster.heal() == [1]
    assert cluster.run(SUM).wait().status == "ok"
