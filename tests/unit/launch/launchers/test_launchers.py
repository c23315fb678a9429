"""The command lines of all launchers, as tables, and which launcher is chosen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.programs import executable
from ring_notebook import config as settings
from ring_notebook.errors import MPIMissingError
from ring_notebook.launch.launchers import site_launchers
from ring_notebook.launch.launchers.find_launcher import find_launcher
from ring_notebook.launch.launchers.hosts import Host, check_interface
from ring_notebook.launch.launchers.launcher import Launcher
from ring_notebook.launch.launchers.own_launchers import Own
from ring_notebook.launch.launchers.site_launchers import Aprun, Hydra, Jsrun, OpenMPI, Pals, Srun
from ring_notebook.launch.supervisor.growth import Elastic
from ring_notebook.machine.own_python import module_command

HERE = [Host("localhost", 3)]
TWO = [Host("a", 2), Host("b", 2)]
SUPERVISOR = module_command("ring_notebook.launch.supervise")
SRUN_FLAGS = ["--mpi=pmi2", "--kill-on-bad-exit=1", "--disable-status", "--input=0"]


def placed(distribution: str, hosts: int, names: str) -> list[str]:
    return [f"--distribution={distribution}", f"--nodes={hosts}", f"--nodelist={names}"]


NIDS = [Host("nid00012", 2), Host("7", 2)]


def sets(hosts: int, each: int) -> list[str]:
    """What jsrun is told of its resource sets."""
    placed = ["--nrs", str(hosts), "--rs_per_host", "1", "--tasks_per_rs", str(each)]
    return [
        *placed,
        "--cpu_per_rs",
        "ALL_CPUS",
        "--gpu_per_rs",
        "ALL_GPUS",
        "--bind",
        "none",
        "-E",
        "OWN",
        "-E",
        "RING_TIMEOUT",
    ]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setattr(site_launchers, "loaded_mpi", lambda: "MPICH")
    settings.config.cache_clear()
    yield
    settings.config.cache_clear()


@pytest.mark.parametrize(
    ("launcher", "hosts", "command"),
    [
        (Hydra("m"), [], ["m", "-n", "3", "-v", "p"]),
        (Hydra("m"), HERE, ["m", "-n", "3", "-v", "p"]),
        (Hydra("m"), TWO, ["m", "-n", "3", "-hosts", "a:2,b:2", "-v", "p"]),
        (OpenMPI("m"), [], ["m", "-n", "3", "-v", "p"]),
        (OpenMPI("m"), TWO, ["m", "-n", "3", "--host", "a:2,b:2", "-x", "OWN", "-x", "RING_TIMEOUT", "-v", "p"]),
        (Srun("s"), [], ["s", "--ntasks=3", *SRUN_FLAGS, "-v", "p"]),
        (Srun("s"), TWO, ["s", "--ntasks=3", *placed("plane=2", 2, "a,b"), *SRUN_FLAGS, "-v", "p"]),
        (Srun("s"), [*HERE, *TWO], ["s", "--ntasks=3", *placed("plane=3", 1, "localhost"), *SRUN_FLAGS, "-v", "p"]),
        (Srun("s"), [TWO[0], *HERE], ["s", "--ntasks=3", *placed("block", 2, "a,localhost"), *SRUN_FLAGS, "-v", "p"]),
        (Pals("m"), [], ["m", "-n", "3", "-v", "p"]),
        (Pals("m"), TWO, ["m", "-n", "3", "--ppn", "2", "--hosts", "a,b", "-v", "p"]),
        (Aprun("r"), [], ["r", "-n", "3", "-v", "p"]),
        (Aprun("r"), NIDS, ["r", "-n", "3", "-N", "2", "-L", "12,7", "-v", "p"]),
        (Jsrun("j"), [], ["j", *sets(1, 3), "-v", "p"]),
        (Jsrun("j"), [Host("a", 1), Host("b", 1), Host("c", 1)], ["j", *sets(3, 1), "-v", "p"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Launcher) else None,
)
def test_command_lines(
    launcher: Launcher, hosts: list[Host], command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RING_TIMEOUT", "1")
    monkeypatch.setenv("SECRET", "1")
    assert launcher.command(["p"], 3, hosts, ["-v"], {"OWN": "1"}) == command


@pytest.mark.parametrize(("hosts", "named"), [([], ""), (HERE, ""), (TWO, "a:2,b:2")])
def test_command_line_of_our_supervisor(hosts: list[Host], named: str) -> None:
    assert Own(elastic=Elastic(2)).command(["p"], 3, hosts) == [*SUPERVISOR, "3", "2", "", named, "p"]
    assert Own(requests="pipe").command(["p"], 3, hosts) == [*SUPERVISOR, "3", "0", "pipe", named, "p"]


@pytest.mark.parametrize(
    "launcher", [Hydra("m"), OpenMPI("m"), Srun("s"), Own()], ids=lambda value: type(value).__name__
)
def test_too_few_slots_are_refused(launcher: Launcher) -> None:
    with pytest.raises(ValueError, match="5 ranks need 5 slots, the hosts have 4 slots; give them more"):
        launcher.command(["p"], 5, TWO)


def test_an_interface_that_this_host_has_not() -> None:
    for name, hosts in (("lo", [*HERE, *TWO]), ("", [*HERE, *TWO]), ("nope0", HERE), ("nope0", TWO)):
        check_interface(name, hosts)
    with pytest.raises(ValueError, match=r"no network interface 'nope0'.* one of .*lo"):
        check_interface("nope0", [*HERE, *TWO])


@pytest.mark.parametrize(
    ("launcher", "n", "hosts", "words"),
    [
        (Pals("m"), 4, [Host("a", 1), Host("b", 3)], "the mpiexec of PALS starts the same number .* got a:1, b:3"),
        (Jsrun("j"), 3, TWO, "jsrun starts the same number .* got 3 ranks for 2 hosts of 2 slots; start 4 ranks"),
        (Aprun("r"), 3, TWO, "aprun takes nodes by their numbers, such as 12 or nid00012, got 'a'"),
    ],
    ids=["PALS", "jsrun", "aprun"],
)
def test_what_a_launcher_cannot_place_is_refused(launcher: Launcher, n: int, hosts: list[Host], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        launcher.command(["p"], n, hosts)


def test_open_mpi_runs_as_root_and_oversubscribes() -> None:
    assert Hydra("m").environment() == {}
    assert OpenMPI("m").environment()["OMPI_ALLOW_RUN_AS_ROOT"] == "1"


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("mpiexec (Open MPI) 5.0.11", OpenMPI),
        ("mpiexec (OpenRTE) 4.1.4", OpenMPI),
        ("slurm 23.11.4", Srun),
        ("slurm-wlm 22.05.8", Srun),
        ("HYDRA build details:\\n    Resource management kernels available: user slurm ll lsf pbs", Hydra),
        ("Intel(R) MPI Library for Linux* OS", Hydra),
        ("mpiexec version 1.3.2, PALS", Pals),
    ],
)
def test_a_launcher_is_known_by_what_it_says_of_itself(
    version: str, kind: type[Launcher], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = executable(tmp_path / "launcher", f"#!/bin/sh\necho '{version}'\n")
    monkeypatch.setenv("RING_MPIEXEC", str(path))
    monkeypatch.setattr("ring_notebook.launch.launchers.find_launcher.loaded_mpi", lambda: kind.mpis[0])
    assert find_launcher() == kind(str(path))
    assert find_launcher(Elastic(2)) == Own(elastic=Elastic(2)), "elastic ranks need our supervisor"


@pytest.mark.parametrize(("name", "kind"), [("aprun", Aprun), ("jsrun", Jsrun)])
def test_a_launcher_is_known_by_its_name(
    name: str, kind: type[Launcher], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    executable(tmp_path / name, "#!/bin/sh\n")
    monkeypatch.setenv("RING_MPIEXEC", str(tmp_path / name))
    monkeypatch.setattr("ring_notebook.launch.launchers.find_launcher.loaded_mpi", lambda: kind.mpis[0])
    assert find_launcher() == kind(str(tmp_path / name))


def test_a_launcher_of_another_mpi_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = executable(tmp_path / "mpiexec", "#!/bin/sh\necho 'mpiexec (Open MPI) 5.0.11'\n")
    monkeypatch.setenv("RING_MPIEXEC", str(other))
    with pytest.raises(MPIMissingError, match="starts ranks of Open MPI, and mpi4py loads MPICH; set RING_MPIEXEC"):
        find_launcher()


def test_a_launcher_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RING_MPIEXEC", "/no/such/mpiexec")
    with pytest.raises(MPIMissingError, match="/no/such/mpiexec does not run"):
        find_launcher()
