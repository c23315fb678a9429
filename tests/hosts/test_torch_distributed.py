"""Backend "ring" of torch.distributed over the link of two namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.two_hosts import TwoHosts

PROGRAM = Path(__file__).with_name("torch_distributed.py")


@pytest.mark.parametrize("per_host", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_over_the_link(hosts: TwoHosts, per_host: int) -> None:
    said = hosts.run([str(PROGRAM)], per_host=per_host)
    assert said.count("on 2 hosts: all is well") == 2 * per_host
