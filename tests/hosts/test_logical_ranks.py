"""The same bits wherever the ranks are: on one host, on two by TCP and by MPI, and in a ring on one host."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness.two_hosts import TwoHosts
from hosts.test_over_ssh import BOTH, ringrun

PROGRAM = Path(__file__).parents[1] / "jobs" / "torch" / "logical_program.py"
CASES = ["resnet-sgd-bf16", "gpt-adamw-clip"]


@pytest.mark.slow
def test_one_host_and_two_compute_the_same_bits(hosts: TwoHosts, tmp_path: Path) -> None:
    def train(*where: str, settings: str = "") -> object:
        path = tmp_path / "computed"
        job = [sys.executable, "-W", "ignore", str(PROGRAM), str(path), "4", "12", *CASES]
        said = ringrun(hosts, *where, *job, shell=f'{settings} "$@"')
        assert said.endswith("code 0\n"), said
        return json.loads(path.read_text())

    alone = train("-np", "1")
    assert train(*BOTH) == alone
    assert train(*BOTH, settings="RING_TRANSPORT=mpi") == alone
    assert train("-np", "4", settings="RING_ALGORITHM=ring") == alone
