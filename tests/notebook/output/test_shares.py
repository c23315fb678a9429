"""Where the time of ranks went: the panel and the timeline say the same, of runs that are arranged to show it."""

from __future__ import annotations

from harness.shares import agreed_shares
from ring_notebook.notebook.cluster.cluster import Cluster

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


def shares_of(cluster: Cluster, source: str) -> list[dict[str, float]]:
    run = cluster.run(source, options=RECORDED).wait()
    assert run.status == "ok"
    return agreed_shares(run)


def test_a_straggler(cluster: Cluster) -> None:
    early, late = shares_of(cluster, STRAGGLER)
    assert early["waiting"] > 0.5 > late["waiting"]
    assert late["compute"] > 0.5 > early["compute"]


def test_what_moves_beside_the_program_is_compute(cluster: Cluster) -> None:
    assert all(own["compute"] > 0.5 for own in shares_of(cluster, OVERLAPPED))


def test_a_pipeline(cluster: Cluster) -> None:
    first, second = shares_of(cluster, PIPELINE)
    assert second["bubble"] > 0.5 > first["bubble"]


def test_data_that_is_late(cluster: Cluster) -> None:
    assert all(own["loading"] > 0.5 for own in shares_of(cluster, STARVED))
