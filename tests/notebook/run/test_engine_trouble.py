"""What goes wrong in an engine outside of the cell's own code: the run ends at once and says so, or is not touched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.waiting import until
from ring_notebook.errors import ClusterError
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.run.run import Run

pytestmark = pytest.mark.usefixtures("without_torch")

TAKE_ALL = """import os
print("before")
ring.barrier()  # a rank that fails at once stops others before their first line
held = globals().get("held", [])
if ring.rank() == 1:
    import time
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
"""
TAKE_MEMORY = """import mmap, re, resource
print("before")
held = []
old = resource.getrlimit(resource.RLIMIT_AS)
if ring.rank() == 1:
    used = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), old[1]))
    try:
        while True: held.append(bytearray(1 << 20))
    except MemoryError:
        while True: held.append([0] * 500)
"""
FORKS = """
import multiprocessing, os, signal, subprocess, sys, time, warnings
warnings.simplefilter("ignore")
print("once")
if ring.rank() == 1:
    child = os.fork()
    if child == 0:
        print("of the child")
        ENDS
    else:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
if ring.rank() == 0 or child:
    time.sleep(0.6)
    ring.barrier()
"""


@pytest.fixture(scope="module")
def cluster(_own_records: object) -> Iterator[Cluster]:
    """Engines of these tests' own, which they break."""
    with Cluster(2) as started:
        yield started


def run(cluster: Cluster, source: str, limit: float = 20.0) -> Run:
    """The run of a cell, which has to end."""
    started = cluster.run(source)
    try:
        until(lambda: started.done, limit, started.describe)
    finally:
        started.stop()
    return started


def printed(run: Run, stream: str = "stdout") -> list[tuple[int, str]]:
    return [
        (rank, line)
        for piece in run.view.output
        if piece.stream == stream
        for rank in [piece.rank]
        for line in piece.text.splitlines()
    ]


@pytest.mark.slow  # `make test` runs test_a_limit_under_which_nothing_can_be_opened
def test_a_cell_that_takes_all_descriptors(cluster: Cluster) -> None:
    for _ in range(2):
        failed = run(cluster, TAKE_ALL + "ring.barrier()")
        assert failed.status == "failed"
        assert isinstance(failed.error, OSError), failed.error
        assert "Too many open files" in str(failed.error)
        assert failed.log.ended()[1].summary["line"] == 8
        assert sorted(printed(failed)) == [(0, "before"), (1, "before")]
        # They are still taken: what the engine itself needs it has.
        well = run(cluster, "print('fine')\nring.log(loss=1.0)\nimport time\ntime.sleep(1.5)")
        assert well.status == "ok", well.error
        assert sorted(printed(well)) == [(0, "fine"), (1, "fine")]
        assert sorted(row.rank for row in well.metrics) == [0, 1]
        left_out = [line for rank, line in printed(well, "stderr") if rank == 1]
        assert len(left_out) <= 1
        assert all(line.startswith("Left out of the record: the load of this machine (") for line in left_out)
    assert run(cluster, "for one in held: os.close(one)").status == "ok"


def test_a_cell_that_takes_all_memory(cluster: Cluster) -> None:
    """All of an address space that is limited: the engine has some for its threads and records."""
    failed = run(cluster, TAKE_MEMORY + "ring.barrier()")
    assert isinstance(failed.error, MemoryError), failed.error
    assert failed.log.ended()[1].summary["line"] == 11
    assert sorted(printed(failed)) == [(0, "before"), (1, "before")]
    assert run(cluster, "print('fine')").status == "ok"
    run(cluster, "del held\nif ring.rank() == 1: resource.setrlimit(resource.RLIMIT_AS, old)")


def test_a_limit_under_which_nothing_can_be_opened(cluster: Cluster) -> None:
    """The rank fails before it joins the others, which wait for it."""
    limit = "import resource\nold = resource.getrlimit(resource.RLIMIT_NOFILE)\nif ring.rank() == 1: "
    assert run(cluster, limit + "resource.setrlimit(resource.RLIMIT_NOFILE, (3, old[1]))").status == "ok"
    failed = run(cluster, "ring.barrier()")
    assert "Too many open files" in str(failed.error), failed.error
    assert {rank: end.status for rank, end in failed.log.ended().items()}[1] == "failed"
    pids = [one.pid for one in cluster.status()]
    assert cluster.heal([1]) == [1]
    assert pids[0] == cluster.status()[0].pid
    assert run(cluster, "ring.barrier()").status == "ok"


def test_an_answer_without_a_record(cluster: Cluster) -> None:
    """The engine's own code is broken, so it answers with an error and the others wait."""
    broken = "if ring.rank() == 1:\n    from ring_notebook.engine import runner\n    del runner.Capture"
    assert run(cluster, broken).status == "ok"
    failed = run(cluster, "ring.barrier()")
    assert isinstance(failed.error, ClusterError)
    assert str(failed.error).startswith("rank 1: its engine failed outside of the cell: NameError: name 'Capture'")
    assert "%ring restart" in str(failed.error)
    assert {rank: end.status for rank, end in failed.log.ended().items()} == {0: "interrupted", 1: "failed"}
    assert [one["status"] for one in failed.summary["ranks"]] == ["interrupted", "failed"]
    assert cluster.heal([1]) == [1]
    assert run(cluster, "ring.barrier()").status == "ok"


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("pass", 0),
        ("1 / 0", 1),
        ("ring.barrier()", 1),
        ("__import__('ring_notebook.core.world', fromlist=['world']).close(); sys.exit(5)", 5),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", 130),  # and not its parent
    ],
)
def test_what_a_cell_forks_ends_as_it_likes(cluster: Cluster, ends: str, code: int) -> None:
    forked = run(cluster, FORKS.replace("ENDS", ends))
    assert forked.status == "ok", forked.error
    # The cell also shows what the child printed, unless the child ended before it wrote that out.
    assert sorted({*printed(forked)} - {(1, "of the child")}) == [(0, "once"), (1, "once")]
    assert cluster.pull("code", rank=1) == code
    assert len(forked.log.ended()) == 2
    assert run(cluster, "ring.barrier()").status == "ok"
