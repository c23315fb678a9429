"""A cluster over two hosts, driven from a notebook on one of them."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from harness.numpy_framework import numpy_framework
from harness.two_hosts import ALLOCATION, TwoHosts
from harness.waiting import until

pytestmark = pytest.mark.usefixtures("forked_on_hosts")
PROGRAM = str(Path(__file__).with_name("across.py"))
WITHOUT_TORCH = ("grows", "killed", "allocated", "wrong")


def assert_nothing_runs(hosts: TwoHosts) -> None:
    until(lambda: not hosts.processes(), why=hosts.processes)


@pytest.mark.parametrize(
    "step",
    [
        "everything",
        "grows",
        "killed",
        pytest.param("vanishes", marks=pytest.mark.slow),
        "allocated",
        "wrong",
        pytest.param("parted", marks=pytest.mark.slow),
        pytest.param("compressed", marks=pytest.mark.slow),
    ],
)
def test_across(hosts: TwoHosts, tmp_path: Path, numpy_site: Path, step: str) -> None:
    environment = {"RING_RUNS_DIR": str(tmp_path / "runs")}
    if step == "allocated":
        environment |= ALLOCATION
    with numpy_framework(numpy_site) if step in WITHOUT_TORCH else nullcontext():
        hosts.on_first([sys.executable, PROGRAM, step], timeout=250, environment=environment)
    assert_nothing_runs(hosts)
