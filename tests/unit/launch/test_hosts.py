"""Host lists, host files and allocations, as tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from ring_notebook.launch.hosts import Host, allocation, expand_slurm, parse_hostfile, parse_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2,b:4", [Host("a", 2), Host("b", 4)]),
        ("a", [Host("a", 1)]),
        (" a:2 , b ,", [Host("a", 2), Host("b", 1)]),
        ("10.0.0.1:8", [Host("10.0.0.1", 8)]),
        ("", []),
    ],
)
def test_host_list(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize("text", ["a:", "a:two", ":2", "a:0", "a:-1", "a:2:3"])
def test_a_host_that_cannot_be_read_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match=f"cannot read host '{text}'; expected NAME or NAME:SLOTS"):
        parse_hosts(f"ok:1,{text}")


def test_host_file() -> None:
    text = "# the cluster\na slots=2\n\nb:4  # fast\nc max_slots=9 slots=3\nd\n"
    assert parse_hostfile(text) == [Host("a", 2), Host("b", 4), Host("c", 3), Host("d", 1)]


def test_a_wrong_line_of_a_host_file_is_numbered() -> None:
    with pytest.raises(ValueError, match="host file, line 2: cannot read host 'b:x'"):
        parse_hostfile("a\nb slots=x\n")


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("rack[1-2]n[09-10]", ["rack1n09", "rack1n10", "rack2n09", "rack2n10"]),
        ("c[1-2].site", ["c1.site", "c2.site"]),
    ],
)
def test_slurm_names(nodelist: str, names: list[str]) -> None:
    assert expand_slurm(nodelist) == names


@pytest.mark.parametrize(
    ("env", "hosts"),
    [
        ({}, []),
        (
            {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"},
            [Host("n1", 2), Host("n2", 2), Host("n3", 1)],
        ),
        (
            {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "8(x2)"},
            [Host("n1", 8), Host("n2", 8)],
        ),
        ({"SLURM_JOB_NODELIST": "n1"}, [Host("n1", 1)]),
        ({"LSB_MCPU_HOSTS": "a 2 b 4"}, [Host("a", 2), Host("b", 4)]),
    ],
)
def test_allocation(env: dict[str, str], hosts: list[Host]) -> None:
    assert allocation(env) == hosts


def test_allocation_of_pbs(tmp_path: Path) -> None:
    nodefile = tmp_path / "nodes"
    nodefile.write_text("a\na\nb\n")
    assert allocation({"PBS_NODEFILE": str(nodefile)}) == [Host("a", 2), Host("b", 1)]
