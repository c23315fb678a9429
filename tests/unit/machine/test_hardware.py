"""What a container leaves of the machine, in the files of both kinds of control groups."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ring_notebook.machine import hardware


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /sys/fs/cgroup, on a machine of eight cores that has never run out of memory."""
    monkeypatch.setattr(hardware, "_CGROUPS", tmp_path)
    monkeypatch.setattr(hardware, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(hardware, "_VMSTAT", tmp_path / "vmstat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_quota(groups: Path, quota: int) -> None:
    """Of the processor controller's own hierarchy; -1 is none."""
    write(groups / "cpu" / "cpu.cfs_quota_us", f"{quota}\n")
    write(groups / "cpu" / "cpu.cfs_period_us", "100000\n")


def test_no_limits(groups: Path) -> None:
    assert hardware.cores() == 8
    write(groups / "cpu.max", "max 100000\n")
    assert hardware.cores() == 8
    write_quota(groups, -1)
    assert hardware.cores() == 8
    assert hardware.oom_kills() is None


@pytest.mark.parametrize(("quota", "found"), [(150_000, 2), (20_000, 1), (10_000_000, 8)])
def test_a_part_of_the_processors(groups: Path, quota: int, found: int) -> None:
    write(groups / "cpu.max", f"{quota} 100000\n")
    assert hardware.cores() == found
    write(groups / "cpu.max", "max 100000\n")
    assert hardware.cores() == 8
    write_quota(groups, quota)
    assert hardware.cores() == found


@pytest.mark.parametrize(
    "of_service", ["0::/user.slice/hub.service\n", "4:cpuset:/\n2:cpu,cpuacct:/user.slice/hub.service\n"]
)
def test_a_service_that_has_a_part_of_them(groups: Path, of_service: str) -> None:
    # JupyterHub's systemdspawner, and Slurm, limit the group of a server or a job, not that of the machine.
    write(groups / "own", of_service)
    own = groups / ("" if of_service.startswith("0") else "cpu") / "user.slice" / "hub.service"
    for name, text in (("cpu.max", "200000 100000"), ("cpu.cfs_quota_us", "200000"), ("cpu.cfs_period_us", "100000")):
        write(own / name, text)
    assert hardware.cores() == 2
    write(own.parent / "cpu.max", "100000 100000")
    write(own.parent / "cpu.cfs_quota_us", "100000")
    write(own.parent / "cpu.cfs_period_us", "100000")
    assert hardware.cores() == 1


def test_processes_killed_for_want_of_memory(groups: Path) -> None:
    write(groups / "vmstat", "nr_free_pages 7\noom_kill 1\n")
    assert hardware.oom_kills() == 1
    write(groups / "memory.events", "low 0\nmax 9\noom 3\noom_kill 2\n")
    assert hardware.oom_kills() == 3
    write(groups / "memory" / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert hardware.oom_kills() == 7


def test_the_processes_that_control_groups_allow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "_CGROUPS", tmp_path)
    assert hardware.processes_of_container() == sys.maxsize
    groups = list(hardware._groups("pids"))
    for folder, value in zip(groups, ["max\n", "32\n", "64\n"], strict=False):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pids.max").write_text(value if len(groups) > 1 else "32\n")
    assert hardware.processes_of_container() == 32
