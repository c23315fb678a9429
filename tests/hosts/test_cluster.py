"""A cluster over two hosts, driven from a notebook on one of them."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from harness.numpy_framework import numpy_framework
from harness.two_hosts import ALLOCATION, TwoHosts

pytestmark = pytest.mark.usefixtures("forked_on_hosts")
PROGRAM = str(Path(__file__).with_name("across.py"))
WITHOUT_TORCH = ("grows", "killed", "allocated", "wrong")
SECONDS_TO_VANISH = 30.0


def assert_nothing_runs(hosts: TwoHosts) -> None:
    deadline = time.monotonic() + SECONDS_TO_VANISH
    while (left := hosts.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


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
