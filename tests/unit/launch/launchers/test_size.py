"""How many engines a cluster gets on which hosts, as a table over machines and allocations."""

from __future__ import annotations

import pytest

from ring_notebook.launch.launchers.hosts import Host
from ring_notebook.machine.gpus import sharing
from ring_notebook.notebook.cluster import default_size
from ring_notebook.notebook.cluster.default_size import Size, choose_size

A, B, HERE = Host("a", 2), Host("b", 2), Host("localhost", 1)
TWO = {"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "17"}
ONE_TASK = {"SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "1", "SLURM_JOB_ID": "17"}
FOUR_TASKS = {**ONE_TASK, "SLURM_TASKS_PER_NODE": "4"}
SLURM = "Slurm job 17: 4 slots on a, b"


@pytest.mark.parametrize(
    ("n", "hosts", "env", "size"),
    [
        (None, [], {}, Size(8, (), "one per core, 8 found, no GPU")),
        (3, [], {}, Size(3, (), "as asked for")),
        (None, [A, B], {}, Size(4, (A, B), "the hosts' slots")),
        (None, [A, B], ONE_TASK, Size(4, (A, B), "the hosts' slots")),
        (None, [HERE], {}, Size(1, (HERE,), "the host's slot")),
        (3, [A, B], {}, Size(3, (A, B), "as asked for")),
        (None, [], TWO, Size(4, (A, B), SLURM)),
        (3, [], TWO, Size(3, (A, B), f"as asked for, in {SLURM}")),
        (None, [], FOUR_TASKS, Size(4, (Host("localhost", 4),), "Slurm job 17: 4 slots on localhost")),
        (8, [], FOUR_TASKS, Size(8, (Host("localhost", 4),), "as asked for, in Slurm job 17: 4 slots on localhost")),
        (None, [], ONE_TASK, Size(8, (HERE,), "one per core, 8 found, no GPU; Slurm job 17: 1 slot on localhost")),
    ],
)
def test_size(
    n: int | None, hosts: list[Host], env: dict[str, str], size: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(default_size, "gpus", list)
    monkeypatch.setattr(default_size, "cores", lambda: 8)
    assert choose_size(n, hosts) == size


@pytest.mark.parametrize(
    ("gpus", "cores", "size"),
    [
        (["0", "1", "2"], 8, Size(3, (), "one per GPU, 3 found")),
        (["MIG-a", "MIG-b"], 8, Size(2, (), "one per GPU, 2 found")),
        (["0"], 8, Size(2, (), f"one per GPU, 1 found; at least two; {sharing(2, ['0'])}")),
        ([], 1, Size(2, (), "one per core, 1 found, no GPU; at least two")),
    ],
)
def test_size_of_a_machine(gpus: list[str], cores: int, size: Size, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_size, "gpus", lambda: gpus)
    monkeypatch.setattr(default_size, "cores", lambda: cores)
    assert choose_size() == size


@pytest.mark.parametrize(
    ("n", "hosts", "said"),
    [(2, [], ""), (3, [], "; 3 ranks share 2 GPUs"), (4, [Host("localhost", 4)], "; 4 ranks share"), (4, [A, B], "")],
)
def test_a_size_that_leaves_ranks_without_a_gpu_says_so(
    n: int, hosts: list[Host], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_size, "gpus", lambda: ["0", "1"])
    assert choose_size(n, hosts).why.startswith(f"as asked for{said}")
    assert ("share" in choose_size(n, hosts).why) is bool(said)


def test_several_hosts_with_too_few_slots_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="5 ranks do not fit into Slurm job 17: 4 slots on a, b; ask for a larger job"):
        choose_size(5)
    with pytest.raises(ValueError, match="5 ranks need 5 slots, the hosts have 4 slots"):
        choose_size(5, [A, B])
