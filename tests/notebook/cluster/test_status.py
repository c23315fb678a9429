"""Who is stuck where: what a run that makes no progress says of every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.waiting import until
from ring_notebook.errors import ClusterError
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.panel import machines
from ring_notebook.notebook.run.run import Run
from ring_notebook.protocol.records import Status


def wait_for(run: Run, there: Callable[[dict[int, Status]], bool]) -> dict[int, Status]:
    """The statuses of the ranks as soon as they show what is expected."""

    def shown() -> dict[int, Status] | None:
        statuses = run.log.statuses()
        return statuses if len(statuses) == run.log.size and there(statuses) else None

    return until(shown, why=run.log.statuses) or {}


def end(run: Run) -> None:
    run.stop()
    with pytest.raises(KeyboardInterrupt):
        run.wait()


def test_a_rank_that_waits_in_a_collective_says_for_whom(cluster: Cluster) -> None:
    run = cluster.run(
        "import time\nfrom ring_notebook.core import world\nw = world.current()\n"
        "if w.rank == 0:\n    w.communicator.barrier(name='here')\ntime.sleep(60)"
    )
    statuses = wait_for(run, lambda found: found[0].waiting is not None and found[1].line == 6)
    waiting = statuses[0].waiting
    assert waiting is not None
    assert (waiting["operation"], waiting["name"], waiting["missing"]) == ("barrier", "here", [1])
    assert waiting["seconds"] >= 0
    assert statuses[0].line == 5
    assert statuses[1].waiting is None
    assert "rank 0 is at line 5, waiting in barrier here for rank 1; rank 1 is at line 6" in run.describe()
    end(run)


def test_the_progress_of_a_loop_over_epochs_is_that_of_all(cluster: Cluster) -> None:
    run = cluster.run(
        "import time\nfor epoch in range(10):\n    for _ in ring.track(range(4)):\n"
        "        while epoch == 5 and _ == 2: time.sleep(0.01)"
    )
    wait_for(run, lambda found: all((one.extra["pass"], one.progress) == (6, (2, 4)) for one in found.values()))
    state = run.state()
    end(run)
    assert state["progress"] == pytest.approx((5 + 2 / 4) / 10)


def test_restart_ends_what_no_interrupt_does(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    run = cluster.run("from mpi4py import MPI\nMPI.COMM_WORLD.recv(source=MPI.COMM_WORLD.rank)")
    wait_for(run, lambda found: found[0].line == 2)
    assert run.stop(timeout=1) is False
    assert not run.done
    assert "rank 0 is at line 2" in run.describe()
    assert capfd.readouterr() == ("", "")
    cluster.restart()
    with pytest.raises(ClusterError, match="the cluster was stopped"):
        run.wait()
    assert cluster.run("pass").wait().status == "ok"


@pytest.mark.slow
def test_a_run_tells_with_how_many_threads_its_ranks_compute(cluster: Cluster) -> None:
    before = "import ring_notebook.torch, torch\nbefore = torch.get_num_threads()\ntorch.set_num_threads(64)"
    cluster.run(before).wait()
    run = cluster.run("import time\ntime.sleep(3)\ntorch.set_num_threads(before)")
    run.wait()
    told = {row.rank: row.values.get("threads") for row in run.log.loads()}
    assert told == {0: 64.0, 1: 64.0}
    assert any("2 ranks compute with 128 threads on" in one for one in machines.warnings(run.log, run.log.view()))
