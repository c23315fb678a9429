"""Where the time of ranks went, and why one is slow: panel and timeline say the same, and what was done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.shares import agreed_seconds
from ring_notebook.analysis.slow_ranks_and_links import CAUSES
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.run.timeline import vega_lite

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

RECORDED = {"timeline": True}
STRAGGLER = """
import time, torch
for step in range(40):
    ring.allreduce(torch.ones(1000))
    time.sleep(0.03 * ring.rank())
    ring.log(step=step)
"""
OVERLAPPED = """
import time, torch
tensors = [torch.ones(1 << 18) for _ in range(4)]
for step in range(20):
    under_way = [ring.allreduce_async(tensor) for tensor in tensors]
    time.sleep(0.03)
    for one in under_way:
        ring.synchronize(one)
    ring.log(step=step)
"""
PIPELINE = """
import time, torch
import torch.distributed as dist
dist.init_process_group("ring")
message = torch.ones(1000)
for step in range(20):
    if ring.rank() == 0:
        time.sleep(0.03)
        dist.send(message, 1)
    else:
        dist.recv(message, 0)
    ring.log(step=step)
dist.destroy_process_group()
"""
STARVED = """
import time, torch
def slow():
    for number in range(20):
        time.sleep(0.02)
        yield number
for number in ring.track(slow()):
    ring.allreduce(torch.ones(10))
    ring.log(number=number)
"""


# At least half of what a program sleeps counts as sleep. What its threads compute beside it does not, nor do waits for
# a core while data moves: little moves here. No share of the whole time: that grows where others compute.
def seconds_of(cluster: Cluster, source: str) -> list[dict[str, float]]:
    run = cluster.run(source, options=RECORDED).wait()
    assert run.status == "ok"
    return agreed_seconds(run)


def test_a_straggler_that_sleeps(cluster: Cluster) -> None:
    early, late = seconds_of(cluster, STRAGGLER)
    assert early["waiting"] > late["waiting"]
    assert late["asleep"] > early["asleep"]
    assert late["asleep"] > 0.5 * 40 * 0.03


def test_waits_for_more_of_the_data_are_none_for_a_rank(cluster: Cluster) -> None:
    run = cluster.run(STRAGGLER.replace("1000", "1 << 20"), options=RECORDED).wait()
    early, late = agreed_seconds(run)
    bars = vega_lite(run.timeline().spans)["data"]["values"]
    drawn = sum(bar["end"] - bar["begin"] for bar in bars if (bar["rank"], bar["phase"]) == (0, "waiting"))
    assert drawn == pytest.approx(early["waiting"], rel=0.1, abs=0.1)
    assert early["waiting"] > late["waiting"]


def test_what_moves_beside_a_program_that_sleeps(cluster: Cluster) -> None:
    assert all(own["asleep"] > 0.5 * 20 * 0.03 for own in seconds_of(cluster, OVERLAPPED))


def test_a_single_row_begins_no_training(cluster: Cluster) -> None:
    """The shares are those of the cell, not of the moment behind a result that it logs last."""
    for own in seconds_of(cluster, "import time; time.sleep(0.5); ring.barrier(); ring.log(result=1.0)"):
        assert sum(own.values()) > 0.5


def test_a_pipeline(cluster: Cluster) -> None:
    first, second = seconds_of(cluster, PIPELINE)
    assert second["bubble"] > first["bubble"]


def test_data_that_is_late(cluster: Cluster) -> None:
    assert all(own["loading"] > 0.5 * 20 * 0.02 for own in seconds_of(cluster, STARVED))


WRITES = """
import os, tempfile
with tempfile.TemporaryFile() as file:
    if ring.rank() == 1:
        file.write(os.urandom(1 << 26))
        os.fsync(file.fileno())
"""


def test_what_an_earlier_cell_did_is_no_cause(cluster: Cluster) -> None:
    """Rank 1 sleeps, and has written files before, in a cell without a row that says when training begins."""
    cluster.run(WRITES).wait()
    run = cluster.run(STRAGGLER.replace("    ring.log(step=step)\n", ""), options=RECORDED).wait()
    assert cause_in(run.timeline().why) == "asleep"


def cause_in(sentence: str) -> str:
    """The name of the cause in a sentence of `slow_ranks`; "none" where no rank is called slow."""
    found = re.match(r"rank 1 is (?:over )?[\d.]+x slower (.+?); the others wait", sentence, re.IGNORECASE)
    return next((name for name, (why, _) in CAUSES.items() if found and why == found[1]), "none")


OF_STEPS = ("asleep", "compute", "garbage", "disk", "threads", "queued", "throttled", "memory")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*OF_STEPS, "backward", "data", "samples"])
def test_no_cause_is_called_another(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The faults of `benchmarks/slow_ranks.py` on rank 1, in a cluster of its own because some outlast the cell."""
    monkeypatch.chdir(tmp_path)
    source = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\nimport slow_ranks\n"
    with Cluster(2) as own:
        run = own.run(f"{source}slow_ranks.train({fault!r}, 0, 6, None)", options=RECORDED).wait()
        panel, timeline = run.log.view().slow, run.timeline().why
    said = [timeline] if panel is None else [timeline, panel.sentence]  # it says nothing of few steps
    # On a busy machine a rank may wait longer for a processor than for what it was given, or both ranks as long.
    of_busy = {"queued", "none"} if fault in ("queued", "throttled") else {"queued"}
    assert {cause_in(one) for one in said} <= {{"backward": "asleep"}.get(fault, fault)} | of_busy, said
