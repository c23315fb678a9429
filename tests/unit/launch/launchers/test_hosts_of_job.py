"""Allocations of batch systems, as tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from ring_notebook.launch import cli
from ring_notebook.launch.hosts_of_job import Allocation, find_allocation
from ring_notebook.launch.launchers.hosts import Host
from ring_notebook.launch.run_function import run


@pytest.mark.parametrize(
    ("env", "allocation"),
    [
        ({}, None),
        ({"SLURM_JOB_NODELIST": ""}, None),
        (
            {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_JOB_ID": "17"},
            Allocation("Slurm", "17", (Host("n1", 2), Host("n2", 2), Host("n3", 1))),
        ),
        (
            {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "8(x2)"},
            Allocation("Slurm", "", (Host("n1", 8), Host("n2", 8))),
        ),
        ({"SLURM_JOB_NODELIST": "n1"}, Allocation("Slurm", "", (Host("n1", 1),))),
        (
            {"LSB_MCPU_HOSTS": "a 2 b 4", "LSB_JOBID": "9"},
            Allocation("LSF", "9", (Host("a", 2), Host("b", 4))),
        ),
    ],
)
def test_hosts_of_job(env: dict[str, str], allocation: Allocation | None) -> None:
    assert find_allocation(env) == allocation


def test_allocation_of_pbs(tmp_path: Path) -> None:
    nodefile = tmp_path / "nodes"
    nodefile.write_text("a\na\nb\n")
    env = {"PBS_NODEFILE": str(nodefile), "PBS_JOBID": "5.head"}
    assert find_allocation(env) == Allocation("PBS", "5.head", (Host("a", 2), Host("b", 1)))
    with pytest.raises(OSError, match=r"PBS_NODEFILE=/no/such, by which PBS names .*: No such file.*; unset it"):
        find_allocation({**env, "PBS_NODEFILE": "/no/such"})
    nodefile.write_text("\n")
    with pytest.raises(ValueError, match=r"PBS_NODEFILE='.*nodes' names no host"):
        find_allocation(env)


@pytest.mark.parametrize(
    ("hosts", "with_jsrun", "kept"),
    [
        ("batch 1 a 42 b 42", True, ["a", "b"]),
        ("a 42 b 42", True, ["a", "b"]),
        ("a 1", True, ["a"]),
        ("a 1 b 2", False, ["a", "b"]),
    ],
)
def test_the_batch_node_of_lsf_runs_no_rank(hosts: str, with_jsrun: bool, kept: list[str], tmp_path: Path) -> None:
    if with_jsrun:
        (tmp_path / "jsrun").touch(mode=0o755)
    allocation = find_allocation({"LSB_MCPU_HOSTS": hosts, "PATH": str(tmp_path)})
    assert allocation is not None
    assert [host.name for host in allocation.hosts] == kept


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ([Host("n1", 1)], "Slurm job 17: 1 slot on n1"),
        ([Host("n1", 2), Host("n2", 2)], "Slurm job 17: 4 slots on n1, n2"),
        ([Host(f"n{i}", 8) for i in range(64)], "Slurm job 17: 512 slots on 64 hosts, n0 to n63"),
    ],
)
def test_an_allocation_in_words(hosts: list[Host], words: str) -> None:
    assert str(Allocation("Slurm", "17", tuple(hosts))) == words


@pytest.mark.parametrize(("arguments", "slots"), [("-np 9", 4), ("-np 9 --ppn 3", 6), ("--scale 2,9", 4)])
def test_more_ranks_than_an_allocation_has_slots(
    arguments: str, slots: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2)")
    with pytest.raises(SystemExit):
        cli.main([*arguments.split(), "true"])
    said = capsys.readouterr().err.splitlines()[-1]
    fits_not = f"9 ranks do not fit into Slurm job: {slots} slots on n1, n2; ask for a larger job, or start fewer ranks"
    assert said.endswith(fits_not)
    with pytest.raises(ValueError, match="9 ranks do not fit into Slurm job: 4 slots"):
        run(print, n=9)
