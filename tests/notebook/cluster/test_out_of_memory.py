"""A rank that the Linux kernel kills for want of memory: the cell says so, and the others keep their variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.small_memory import small_group, write
from ring_notebook.errors import ClusterError
from ring_notebook.notebook.cluster.cluster import Cluster

LIMIT = 150 << 20
CELL = """
from ring_notebook.core import world
kept = 7
world.current().communicator.barrier()
if world.current().rank == 1:
    held = [b"x" * (10 << 20) for _ in range(60)]
world.current().communicator.barrier()
"""


@pytest.fixture(scope="module")
def cluster(_own_records: Path, without_torch: None) -> Iterator[Cluster]:
    """Of its own: MPI has ended where a rank has died."""
    with Cluster(2) as started:
        yield started


@pytest.fixture
def group() -> Iterator[Path]:
    with small_group(LIMIT) as group:
        yield group


def test_the_cell_says_that_memory_ran_out_and_heal_brings_the_rank_back(cluster: Cluster, group: Path) -> None:
    if not write(group, "cgroup.procs", cluster.status()[1].pid):
        pytest.skip("processes cannot be moved to another control group here")
    with pytest.raises(ClusterError, match=r"rank 1 on .* was killed by SIGKILL, out of memory\. The other ranks keep"):
        cluster.run(CELL).wait()
    assert "out of memory" in cluster.status()[1].death
    assert cluster.pull("kept", 0) == 7
    assert cluster.heal() == [1]
    assert (
        cluster.run("from ring_notebook.core import world\nworld.current().communicator.barrier()").wait().status
        == "ok"
    )
