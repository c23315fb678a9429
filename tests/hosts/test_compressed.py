"""Gradients in fewer bytes: between two hosts, two ranks on each, and between ranks that act as hosts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from harness.programs import RINGRUN, ran
from harness.two_hosts import TwoHosts

pytestmark = pytest.mark.usefixtures("forked_on_hosts")
PROGRAM = Path(__file__).with_name("compressed.py")
VOLUME = """
import sys, torch, ring_notebook.torch as ring
ring.init()
weights = torch.nn.Parameter(torch.zeros(2048, 2048))
optimizer = ring.DistributedOptimizer(torch.optim.SGD([weights], lr=0.5), compression=eval(sys.argv[1], vars(ring)))
for _ in range(int(sys.argv[2])):
    optimizer.zero_grad()
    (weights * 2).sum().backward()
    assert (weights.grad - 2).abs().max() < 0.02
ring.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("per_host", [1, 2])
def test_over_the_link(hosts: TwoHosts, per_host: int) -> None:
    said = hosts.run([str(PROGRAM)], per_host=per_host)
    assert said.count("on 2 hosts: all is well") == 2 * per_host
    assert said.count("Compression.auto sends of the gradients") == 1


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["thread", "inline"])
def test_between_ranks_that_act_as_hosts(overlap: str) -> None:
    """Three; `test_over_the_link` has two."""
    done = ran(
        [*RINGRUN, "-np", "3", sys.executable, str(PROGRAM)],
        env={**os.environ, "RING_ALGORITHM": "ring", "RING_OVERLAP": overlap},
        timeout=250,
    )
    assert done.stdout.count("all is well") == 3, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("compression", "mib"),
    [
        ("Compression.int8", 4),
        pytest.param("Compression.powersgd(4)", 0.0625, marks=pytest.mark.slow),
        pytest.param("Compression.none", 16, marks=pytest.mark.slow),
    ],
)
def test_a_step_sends_as_much_less_as_is_said(hosts: TwoHosts, compression: str, mib: float) -> None:
    """Of the 16 MiB of a gradient, also with two ranks on each host; what a job sends besides is in both."""
    sent = []
    for steps in (2, 6):
        before = hosts.bytes_sent(0)
        hosts.run(["-c", VOLUME, compression, str(steps)], per_host=2)
        sent.append(hosts.bytes_sent(0) - before)
    each = (sent[1] - sent[0]) / 4 / (1 << 20)
    assert mib <= each < 1.1 * mib + 0.05


@pytest.mark.slow
def test_on_one_host_gradients_are_as_without() -> None:
    said = ran([*RINGRUN, "-np", "2", sys.executable, "-c", ONE_HOST])
    assert said.returncode == 0, said.stdout + said.stderr
    assert "Compression.auto" not in said.stderr


ONE_HOST = """
import torch, ring_notebook.torch as ring
ring.init()
for compression in (ring.Compression.int8, ring.Compression.powersgd(1), ring.Compression.auto):
    weights = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = ring.DistributedOptimizer(torch.optim.SGD([weights], lr=0.5), compression=compression)
    given = [torch.randn(64, 64, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    for _ in range(4):
        optimizer.zero_grad()
        (weights * given[ring.rank()]).sum().backward()
        assert torch.equal(weights.grad, (given[0] + given[1]) / 2)
ring.shutdown()
"""
