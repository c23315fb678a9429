"""A rank that the Linux kernel kills for want of memory: the cell says so, and the others keep their variables."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def write(group: Path, name: str, value: int | str) -> bool:
    """Write a file of a control group; whether there is one."""
    try:
        (group / name).write_text(str(value))
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def cluster(_own_records: Path, without_torch: None) -> Iterator[Cluster]:
    """Of its own: MPI has ended where a rank has died."""
    with Cluster(2) as started:
        yield started


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group that may hold `LIMIT` bytes, and none in swap."""
    of_this = {line.split(":")[1]: line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    root = Path("/sys/fs/cgroup")
    parent = root / "memory" / of_this["memory"][1:] if "memory" in of_this else root / of_this.get("", "/")[1:]
    group = parent / f"ring-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs a control group for memory that this user can make: {error}")
    limited = write(group, "memory.limit_in_bytes", LIMIT) or write(group, "memory.max", LIMIT)
    write(group, "memory.memsw.limit_in_bytes", LIMIT)
    write(group, "memory.swap.max", 0)
    if limited:
        yield group
    while True:
        try:
            group.rmdir()  # empty as soon as the kernel has taken back the killed one's memory
            break
        except OSError:
            time.sleep(0.05)
    if not limited:
        pytest.skip("control groups do not limit memory here")


def test_the_cell_says_that_memory_ran_out_and_heal_brings_the_rank_back(cluster: Cluster, small_group: Path) -> None:
    if not write(small_group, "cgroup.procs", cluster.status()[1].pid):
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
