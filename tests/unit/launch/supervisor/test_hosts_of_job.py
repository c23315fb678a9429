"""Where ranks of a job over several hosts go, what starts an agent there, and which interface leads there."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.programs import executable
from ring_notebook.launch.launchers.hosts import parse_hosts, place
from ring_notebook.launch.remote.network import interface_towards, network_variables
from ring_notebook.launch.remote.remote_shell import agent_command, shell_environment
from ring_notebook.machine.own_python import module_command

HERE = socket.gethostname()
AGENT = module_command("ring_notebook.launch.remote.agent")


def quoted(way: str) -> list[str]:
    return [*(shlex.quote(word) for word in AGENT), way]


@pytest.mark.parametrize(
    ("n", "hosts", "placed"),
    [
        (4, "a:2,b:2", {"a": [0, 1], "b": [2, 3]}),
        (3, "a:2,b:2", {"a": [0, 1], "b": [2]}),
        (2, "a:2,b:2", {"a": [0, 1]}),
        (4, "a:1,b:2,a:1", {"a": [0, 3], "b": [1, 2]}),
        (3, "localhost:1,a:1,127.0.0.1:1", {HERE: [0, 2], "a": [1]}),
    ],
)
def test_ranks_fill_the_hosts_in_order(n: int, hosts: str, placed: dict[str, list[int]]) -> None:
    assert place(n, parse_hosts(hosts)) == placed


@pytest.mark.parametrize(
    ("programs", "env", "shell", "expected"),
    [
        ([], {}, "", ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "b", *quoted("plain")]),
        ([], {}, "ssh -p 22 -i 'my key'", ["ssh", "-p", "22", "-i", "my key", "b", *quoted("plain")]),
        (["blaunch"], {"LSB_JOBID": "1"}, "", ["blaunch", "b", *quoted("batch")]),
        (["pbs_tmrsh"], {"PBS_JOBID": "1"}, "", ["pbs_tmrsh", "b", *quoted("batch")]),
        (["srun"], {"SLURM_JOB_ID": "1"}, "rsh", ["rsh", "b", *quoted("stream")]),
    ],
)
def test_what_starts_an_agent(
    programs: list[str],
    env: dict[str, str],
    shell: str,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: Callable[..., None],
) -> None:
    for name in programs:
        executable(tmp_path / name, "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    settings(remote_shell=shell)
    assert agent_command("b") == expected


def test_slurm_starts_an_agent_in_a_step_that_leaves_all_cores_to_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(tmp_path / "srun", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    command = agent_command("b")
    assert command[0] == "srun"
    assert {"--overlap", "--mpi=none", "--cpu-bind=none", "--nodelist=b"} < set(command)
    assert command[-len(AGENT) - 1 :] == [*AGENT, "batch"]


def test_what_sends_its_environment_to_other_hosts_gets_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(tmp_path / "srun", "#!/bin/sh\n")
    found = {
        "PATH": str(tmp_path),
        "HOME": "/home/a",
        "HF_TOKEN": "x",
        "IPP_CONNECTION_INFO": "{}",
        "RING_RUN_KEY": "x",
    }
    of_slurm = {"SLURM_JOB_ID": "1", "SLURM_CONF": "/etc/slurm.conf"}
    monkeypatch.setattr(os, "environ", found)
    assert shell_environment() == found, "ssh keeps it"
    monkeypatch.setattr(os, "environ", {**found, **of_slurm, "SLURM_JWT": "a token"})
    assert shell_environment() == {"PATH": str(tmp_path), "HOME": "/home/a", **of_slurm}


def test_the_interface_that_leads_to_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_towards(["no-such-host.invalid", "127.0.0.1"]) == "lo"
    assert interface_towards(["no-such-host.invalid"]) == ""
    assert network_variables(["no-such-host.invalid"]) == {}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    variables = network_variables(["127.0.0.1"])
    assert variables["UCX_NET_DEVICES"].split(",")[0] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in variables, "what the user has set stays"
