"""Cells that speak torch.distributed: again and again, on other ranks, after failures, on both backends."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness import absent_ranks
from harness.waiting import until
from ring_notebook.analysis import time_limits
from ring_notebook.errors import ClusterError, CollectiveMismatch
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.run.run import Run

USES = """
import torch, torch.distributed as dist
dist.init_process_group("{backend}")
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert tensor.item() == dist.get_world_size() == ring.size()
"""
FAILS = """
import torch, torch.distributed as dist
dist.init_process_group("{backend}")
if ring.rank() == 1:
    raise ValueError("boom")
dist.all_reduce(torch.ones(1))
dist.all_reduce(torch.ones(1))
"""
MAKES = """
import torch
from torch.nn.parallel import DistributedDataParallel
ring.process_group("{backend}")
model = DistributedDataParallel(torch.nn.Linear(2, 1))
"""
TRAINS = """
model.zero_grad()
model(torch.ones(1, 2) * (ring.rank() + 1)).sum().backward()
assert model.module.weight.grad.tolist() == [[1.5, 1.5]], model.module.weight.grad
"""


@pytest.mark.parametrize("backend", ["ring", "gloo"])
def test_a_cell_again_and_after_a_failure(cluster: Cluster, backend: str) -> None:
    uses, fails = USES.format(backend=backend), FAILS.format(backend=backend)
    for _ in range(2):
        assert cluster.run(uses).wait().status == "ok"
    failed = cluster.run(fails)
    with pytest.raises(ValueError, match="boom"):
        failed.wait()
    assert [rank.ended.status for rank in failed.log.view().ranks if rank.ended] == ["aborted", "failed"]
    assert cluster.run(uses, n=1).wait().status == "ok"
    assert cluster.run(uses).wait().status == "ok"


IS_KILLED = """
import os, torch, torch.distributed as dist
dist.init_process_group("{backend}")
dist.barrier()
if ring.rank() == 1:
    os.kill(os.getpid(), 9)
while True:
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize("backend", ["ring", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed(cluster: Cluster, backend: str) -> None:
    """The other one stops waiting for it; once it has been started again, both work."""
    with pytest.raises(ClusterError, match="rank 1"):
        cluster.run(IS_KILLED.format(backend=backend)).wait()
    until(lambda: cluster.living == [0])
    assert cluster.heal() == [1]
    assert cluster.run(USES.format(backend=backend)).wait().status == "ok"


WAITS_IN_GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.group.WORLD._get_backend(torch.device("cpu")).recv([torch.ones(1)], 1 - ring.rank(), 0).wait()
"""
"""Past the gate."""


def healed(cluster: Cluster, run: Run, ranks: Sequence[int]) -> None:
    """``ranks`` were ended and start again, the others keep their variables, and Gloo works."""
    before = {engine.rank: engine.pid for engine in cluster.status()}
    assert run.ended_ranks == ranks
    assert cluster.heal(run.ended_ranks) == ranks
    assert {engine.rank for engine in cluster.status() if engine.pid != before[engine.rank]} == {*ranks}
    assert cluster.run(USES.format(backend="gloo")).wait().status == "ok"


def test_an_interrupt_in_gloos_own_code(cluster: Cluster) -> None:
    """C++ looks at no signal: a rank that waits there is ended. It says which operation that was.

    The end of one closes the connection of the other, which raises then: the last rank is not ended.
    """
    run = cluster.run(WAITS_IN_GLOO)
    until(lambda: [status.line for status in run.log.statuses().values()] == [3, 3])
    run.stop()
    with pytest.raises(
        ClusterError, match=r"rank [01] was ended: 5 s after an interrupt it still waited in dist\.recv,"
    ):
        run.wait()
    assert len(run.ended_ranks) == 1
    healed(cluster, run, run.ended_ranks)


FAILS_IN_A_MODEL = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
if ring.rank() == 1:
    raise ValueError("boom")
model(torch.ones(1, 2)).sum().backward()
"""


def test_a_rank_that_fails_while_another_trains_on_gloo(cluster: Cluster) -> None:
    """That one waits at the gate: it ends at once, and keeps its variables, though its model keeps the group."""
    run = cluster.run(FAILS_IN_A_MODEL)
    with pytest.raises(ValueError, match="boom"):
        run.wait()
    assert run.ended_ranks == []
    assert cluster.run("assert isinstance(model, torch.nn.parallel.DistributedDataParallel)", n=1).wait().status == "ok"
    assert cluster.run(USES.format(backend="gloo")).wait().status == "ok"


PROGRAM = Path(__file__).parents[2] / "jobs" / "torch" / "desynchronized.py"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("another shape", r"rank 1: dist\.all_reduce sum float32 \[256\]"),
        pytest.param("one microbatch less", "no rank can continue", marks=pytest.mark.slow),
        pytest.param("another order of two groups", "no rank can continue", marks=pytest.mark.slow),
        pytest.param("skips a forward", r"rank 1: dist\.all_reduce sum float32 \[1\]", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_part_on_gloo(cluster: Cluster, case: str, words: str) -> None:
    """No rank is ended, and the next cell trains in a new group."""
    program = PROGRAM.read_text()
    run = cluster.run(f"import os; os.environ['CASE'] = {case!r}\n{program}")
    with pytest.raises(CollectiveMismatch, match=words):
        run.wait()
    assert run.ended_ranks == []
    assert cluster.run(USES.format(backend="gloo")).wait().status == "ok"


ONE_WAITS_IN_GLOO = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
if ring.rank() == 1:
    time.sleep(1000)
dist.recv(torch.ones(1), 1)
"""


def test_an_interrupt_of_a_rank_that_another_waits_for(cluster: Cluster) -> None:
    """It ends at once, and its end is what the other one sees in Gloo, before the interrupt."""
    run = cluster.run(ONE_WAITS_IN_GLOO)
    until(lambda: [status.line for status in run.log.statuses().values()] == [5, 4])
    assert run.stop() is True
    with pytest.raises(KeyboardInterrupt, match="stopped at line"):
        run.wait()
    assert cluster.run(USES.format(backend="gloo")).wait().status == "ok"


CONNECTS = f"""
{inspect.getsource(absent_ranks)}
import torch
if ring.rank() == 1:
    ring.recv(torch.ones(1), 0)
    raise ValueError("boom")
store = AbsentRanks(lambda: ring.send(torch.ones(1), 1))
dist.init_process_group("gloo", store=store, rank=0, world_size=2)
"""


def test_a_rank_that_another_one_waits_for_to_connect(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo would wait for it for hours."""
    monkeypatch.setattr(time_limits, "UNHEARD", 1.0)
    run = cluster.run(CONNECTS.strip())
    with pytest.raises(ValueError, match="boom"):
        run.wait()
    healed(cluster, run, [0])


LEAVES_A_SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
group = dist.group.WORLD
dist.barrier()
if ring.rank() == 1:
    raise ValueError("boom")
pending = dist.all_reduce(torch.ones(1 << 24), async_op=True)
ring.barrier()
"""


def test_a_sum_in_gloo_that_nobody_ends(cluster: Cluster) -> None:
    """Its thread waits for a rank that has failed, and who drops the group, as a model does, waits for the thread."""
    with pytest.raises(ValueError, match="boom"):
        cluster.run(LEAVES_A_SUM).wait()
    drops = cluster.run("group = pending = None\nimport gc; gc.collect()")
    until(lambda: drops.done)
    assert drops.status == "ok"


OTHER_GROUPS = (
    "Accelerator = None",
    USES.format(backend="ring"),
    USES.format(backend="gloo"),
    "ring.process_group('gloo')",
)
"""Cells before which, or in which, the groups that there are end."""


def test_a_model_of_an_earlier_cell(cluster: Cluster) -> None:
    """It trains in the next cells, also after one that failed, and when the default group is another one."""
    for backend in ("gloo", "ring"):
        cluster.run(MAKES.format(backend=backend)).wait()
        cluster.run(TRAINS).wait()
        for cell in OTHER_GROUPS:
            cluster.run(cell).wait()
            cluster.run(TRAINS).wait()
        with pytest.raises(ValueError, match="boom"):
            cluster.run("if ring.rank() == 1:\n    raise ValueError('boom')\n" + TRAINS).wait()
        for _ in range(2):
            cluster.run(TRAINS).wait()


STAGES = """
import time
import torch, torch.distributed as dist
dist.init_process_group("{backend}")
first = dist.get_rank() == 0
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
for batch in ring.track([torch.ones(2, 4)] * 12, shared_by=2):
    if first:
        time.sleep(0.05)
        dist.send(batch, 1, tag=7)
    else:
        dist.recv(batch, 0, tag=7)
    loss = model(batch).sum()
    if not first:
        time.sleep(0.05)
    loss.backward()
    ring.log(loss=loss.item())
"""


@pytest.mark.parametrize(
    ("backend", "message", "collective"),
    [("ring", "receive from rank 0, tag 7", "allreduce"), ("gloo", "dist.recv from rank 0, tag 7", "dist.all_reduce")],
)
def test_what_stages_wait_for_is_seen(cluster: Cluster, backend: str, message: str, collective: str) -> None:
    """On any backend: messages as the bubble, the backward pass of another stage as waiting; samples count once."""
    run = cluster.run(STAGES.format(backend=backend), options={"timeline": True})
    assert run.wait().status == "ok"
    first, second = run.log.view().ranks
    assert second.spent.bubble > first.spent.bubble
    assert first.spent.waiting > second.spent.waiting
    assert (first.samples, second.samples) == (12, 12)
    spans = run.timeline().spans
    assert {(one.rank, one.phase) for one in spans if one.what == message} >= {(1, "bubble")}
    assert any(one.rank == 0 and one.phase == "waiting" and one.what.startswith(collective) for one in spans)


def test_the_variables_of_a_cell(cluster: Cluster) -> None:
    """Those of its ranks, and not of the engines."""
    cell = """
import os
assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(ring.rank()), str(ring.size()))
assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == (str(ring.local_rank()), str(ring.local_size()))
assert os.environ["MASTER_ADDR"] == "127.0.0.1" and int(os.environ["MASTER_PORT"])
"""
    cluster.run(cell).wait()
    cluster.run(cell, n=1).wait()


def test_an_engine_is_no_terminal(cluster: Cluster) -> None:
    """Lightning refuses to train where ``sys.ps1`` is."""
    cluster.run("import sys\nassert not hasattr(sys, 'ps1')").wait()
