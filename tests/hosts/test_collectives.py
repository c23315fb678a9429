"""Collectives between hosts: over the link of two namespaces, between simulated hosts, and by the ring within one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from harness.programs import RINGRUN, ran
from harness.two_hosts import TwoHosts, missing, two_hosts
from ring_notebook.launch.launchers.find_launcher import find_launcher
from ring_notebook.launch.launchers.site_launchers import Hydra

pytestmark = pytest.mark.usefixtures("forked_on_hosts")
PROGRAM = Path(__file__).with_name("collectives.py")
VOLUME = """
import os, sys, torch, ring_notebook.torch as ring
os.environ["RING_WIRE"] = sys.argv[1]
ring.init()
ring.barrier()
tensor = ring.empty(4 << 20).fill_(1)
ring.allreduce_(tensor, op=ring.Sum)
assert (tensor == ring.size()).all()
ring.shutdown()
"""


LOCAL = """
import sys, torch, ring_notebook.torch as ring
ring.init()
weights = torch.nn.Parameter(torch.zeros(4 << 20))
how = ring.LocalSteps(2, lr=1, momentum=0, fragments=1, delay=int(sys.argv[2]), alpha=0)
plain = torch.optim.SGD([weights], lr=0.5)
optimizer = ring.DistributedOptimizer(plain, sync_every=how, compression=getattr(ring.Compression, sys.argv[1]))
for step in range(2 + how.delay):
    weights.grad = torch.linspace(0, 1 + ring.rank(), len(weights))
    optimizer.step()
mean = torch.linspace(0, (1 + ring.size()) / 2, len(weights))
assert (optimizer.common[weights] + mean).abs().max() < 0.02
assert len({one.numpy().tobytes() for one in ring.allgather_object(optimizer.common[weights][::4096].clone())}) == 1
ring.shutdown()
"""


@pytest.mark.parametrize("per_host", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_over_the_link(hosts: TwoHosts, per_host: int) -> None:
    said = hosts.run([str(PROGRAM), "over the link"], per_host=per_host)
    assert said.count("on 2 hosts: all is well") == 2 * per_host


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_so_many_hosts_that_they_pass_headers_on() -> None:
    """Two ranks on the first host, one on each other; every collective, mismatches and aborts over TCP."""
    if reason := missing():
        pytest.skip(f"NOT TESTED on 13 hosts: {reason}")
    with two_hosts("1gbit", 13) as many:
        where = ",".join(f"{name}:{1 + (name == many.names[0])}" for name in many.names)
        ringrun = [*RINGRUN, "--no-prefix", "-H", where]
        said = many.on_first([*ringrun, sys.executable, str(PROGRAM)], 900)
        assert said.count("on 13 hosts: all is well") == 14, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "mib", "most"),
    [
        ((VOLUME, ""), 16, 1.1),
        ((VOLUME, "bfloat16"), 8, 1.1),
        ((LOCAL, "int8", "0"), 4, 1.15),
        ((LOCAL, "int8", "1"), 4, 1.15),
        ((LOCAL, "none", "1"), 16, 1.15),
    ],
    ids=["allreduce", "allreduce as bfloat16", "sync", "late sync", "late sync of all bytes"],
)
def test_no_more_is_sent_than_must_be(hosts: TwoHosts, program: tuple[str, ...], mib: int, most: float) -> None:
    """2(h-1)/h of 16 MiB leaves each host, however many ranks it has; headers take a few per cent."""
    before = hosts.bytes_sent(0)
    hosts.run(["-c", *program], per_host=2)
    sent = hosts.bytes_sent(0) - before
    assert mib << 20 <= sent < most * (mib << 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "ranks", "hosts_seen"),
    [
        ({"MPIR_CVAR_NUM_CLIQUES": "2", "MPIR_CVAR_CLIQUES_BY_BLOCK": "1"}, 3, 2),  # hosts with 2 and 1 ranks
        ({"MPIR_CVAR_NUM_CLIQUES": "3"}, 3, 3),
        ({"RING_ALGORITHM": "ring"}, 3, 1),
        ({"RING_ALGORITHM": "ring"}, 2, 1),
    ],
)
def test_without_a_second_host(settings: dict[str, str], ranks: int, hosts_seen: int) -> None:
    launcher = find_launcher()
    if "RING_ALGORITHM" not in settings and "MPICH" not in launcher.mpis:
        pytest.skip("only MPICH can make one machine look like several hosts")
    if "RING_ALGORITHM" not in settings:  # ranks of our own supervisor do not ask MPI
        launcher = Hydra(str(Path(sys.executable).with_name("mpiexec")))
    done = ran(launcher.command([sys.executable, str(PROGRAM)], ranks), env={**os.environ, **settings}, timeout=250)
    assert done.stdout.count(f"on {hosts_seen} hosts: all is well") == ranks, done.stdout + done.stderr
