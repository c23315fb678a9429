"""The readings of this process and its machine, against what it has really done."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.programs import ran
from ring_notebook.engine import machine_load
from ring_notebook.engine.machine_load import SHORTEST, Machine

STARTS = """
import multiprocessing, time
from ring_notebook.engine.machine_load import SHORTEST, Machine

def work(ready, go_on):
    own = bytearray(64 << 20)
    until = time.process_time() + 2 * SHORTEST
    while time.process_time() < until:
        own[:] = bytes(len(own))
    ready.set()
    go_on.wait()

shared = bytearray(256 << 20)
machine = Machine()
alone = machine.read()["memory"]
context = multiprocessing.get_context("fork")
ready, go_on = context.Event(), context.Event()
worker = context.Process(target=work, args=(ready, go_on), daemon=True)
worker.start()
assert ready.wait(100)
with_worker = machine.read()
assert 64 << 20 <= with_worker["memory"] - alone < 192 << 20, "not what it has got from this process"
assert with_worker["cpu"] > 0
go_on.set()
worker.join()
time.sleep(SHORTEST)
after = machine.read()
assert after["memory"] - alone < 32 << 20
assert after["cpu"] >= 0
"""


@pytest.fixture(autouse=True)
def _no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of this process, such as lanes of tests, do not count. Nor does a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(machine_load, "_CHILDREN", "/nowhere/{}")


def test_a_reading_counts_what_happened_since_the_one_before() -> None:
    machine = Machine()
    until = time.process_time() + SHORTEST
    while time.process_time() < until:
        pass
    busy = machine.read()
    time.sleep(SHORTEST)
    idle = machine.read()
    assert busy["cpu"] > idle["cpu"] >= 0
    assert 10 << 20 < busy["memory"] < 1 << 40
    assert busy["memory_left"] > 0
    assert busy["network"] >= 0
    assert "gpu" not in busy


def test_what_a_rank_has_started_counts_and_what_they_share_counts_once() -> None:
    """In a process of its own: pytest may have other children."""
    done = ran([sys.executable, "-c", STARTS])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("interfaces", "counted"),
    [
        ({"lo": "", "eth0": "device", "eth1": "device", "bond0": "lower_eth0", "docker0": "", "veth1": ""}, 6),
        ({"lo": "", "eth0": "", "eth0.7": "lower_eth0"}, 2),  # in a container
        ({"lo": ""}, 0),
    ],
)
def test_each_byte_of_the_network_counts_once(
    interfaces: dict[str, str], counted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = {}
    for number, (name, link) in enumerate(interfaces.items()):
        (tmp_path / name / link).mkdir(parents=True)
        counters[name] = SimpleNamespace(bytes_sent=number, bytes_recv=number)
    monkeypatch.setattr(machine_load, "_INTERFACES", tmp_path)
    monkeypatch.setattr(machine_load.psutil, "net_io_counters", lambda pernic: counters)
    assert machine_load._network_bytes() == counted


def test_a_gpu_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-4711")
    assert "gpu_memory" not in Machine().read()


def test_a_moment_has_no_rate() -> None:
    machine = Machine()
    at_once = machine.read()
    assert "memory" in at_once
    assert not {"cpu", "network", "disk"} & set(at_once), "hundredths of a second, over a few milliseconds"
    time.sleep(SHORTEST)
    assert 0 <= machine.read()["cpu"] < 150, "since the beginning"
