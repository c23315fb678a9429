"""A heal right after a death, also one for want of memory, and a folder of records that somebody removes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.programs import ran
from harness.small_memory import small_group, write
from ring_notebook.errors import ClusterError
from ring_notebook.notebook.cluster.cluster import Cluster

pytestmark = pytest.mark.usefixtures("without_torch")

ATTACHES = """
import sys
from ring_notebook.notebook.cluster.cluster import Cluster
cluster = Cluster.attach(sys.argv[1])
cluster.run("ring.barrier()").wait()
print("attached", [cluster.pull("kept", rank) for rank in range(cluster.n)])
cluster.foreign = False  # as where the first kernel has ended
cluster.heal([0])
cluster.run("ring.barrier()").wait()
cluster.stop()
print("stopped")
"""
MEMORY = 150 << 20
TAKES_MEMORY = """
from ring_notebook.core import world
kept = 7
world.current().communicator.barrier()
if world.current().rank == 1:
    held = [b"x" * (10 << 20) for _ in range(60)]
world.current().communicator.barrier()
"""


@pytest.fixture
def ring(_own_records: Path) -> Path:
    """The folder of records and clusters."""
    return _own_records.parent


@pytest.fixture(scope="module")
def cluster(_own_records: Path) -> Iterator[Cluster]:
    """Of this file: MPI has ended where a rank has died."""
    with Cluster(2) as started:
        yield started


@pytest.fixture
def group() -> Iterator[Path]:
    with small_group(MEMORY) as group:
        yield group


@pytest.mark.slow
def test_a_heal_at_once_finds_who_has_died(cluster: Cluster) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        os.kill(cluster.status()[1].pid, number)
        assert cluster.heal() == [1], number
        assert cluster.run("ring.barrier()").wait().status == "ok"
    assert cluster.heal() == []


def test_the_cell_says_that_memory_ran_out_and_heal_brings_the_rank_back(cluster: Cluster, group: Path) -> None:
    if not write(group, "cgroup.procs", cluster.status()[1].pid):
        pytest.skip("processes cannot be moved to another control group here")
    with pytest.raises(
        ClusterError, match=r"rank 1 on .* was killed by SIGKILL, probably out of memory\. The other ranks keep"
    ):
        cluster.run(TAKES_MEMORY).wait()
    assert "out of memory" in cluster.status()[1].death
    assert cluster.pull("kept", 0) == 7
    assert cluster.heal() == [1]
    assert (
        cluster.run("from ring_notebook.core import world\nworld.current().communicator.barrier()").wait().status
        == "ok"
    )


def test_the_folder_of_records_is_removed(cluster: Cluster, ring: Path) -> None:
    """As `git clean -fdx` does: the files of a cluster are elsewhere. The last test of this one, which it stops."""
    shutil.rmtree(ring)
    os.kill(cluster.status()[1].pid, signal.SIGKILL)
    assert cluster.heal() == [1]
    assert cluster.run("ring.barrier()").wait().status == "ok"
    cluster.stop()
    assert not cluster.directory.exists()


@pytest.mark.slow
@pytest.mark.parametrize("runtime", [True, False], ids=["of the runtime", "of temporary files"])
def test_another_kernel_finds_a_cluster_when_the_folder_of_records_was_removed(
    ring: Path, runtime: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is to last is not in the folder of the runtime, which goes with the user's last session."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path) if runtime else "")
    cluster = Cluster(2, keep=True).start()
    cluster.run("kept = ring.rank()").wait()
    assert not any(tmp_path.iterdir())
    processes = cluster._processes
    assert processes is not None
    cluster._leave_or_stop()
    shutil.rmtree(ring)
    program = [sys.executable, "-c", ATTACHES, cluster.directory.name.split("-")[1]]  # this process is still there
    done = ran(program)
    if "stopped" not in done.stdout:
        os.kill(processes.pids["controller"], signal.SIGKILL)
    assert done.stdout.splitlines() == ["attached [0, 1]", "stopped"], done.stderr
    assert not cluster.directory.exists()


@pytest.mark.slow
def test_a_run_right_after_an_attach_waits_for_the_subscription(ring: Path) -> None:
    started = Cluster(2, keep=True).start()
    started._leave_or_stop()
    cluster = Cluster.attach()
    assert cluster._engines is not None
    client = cluster._engines._client
    client._io_loop.add_callback(client._iopub_socket.unsubscribe, b"")
    later = threading.Timer(0.7, client._io_loop.add_callback, (client._iopub_socket.subscribe, b""))
    try:
        later.start()
        assert cluster.run("print('here')").wait().status == "ok"
    finally:
        later.join()
        cluster.foreign = False
        cluster.stop()
