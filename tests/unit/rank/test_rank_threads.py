"""How many threads each rank gets, as a table, and that every way to start ranks gives them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from harness.programs import ran
from ring_notebook.launch import doctor_checks
from ring_notebook.launch.run_function import run
from ring_notebook.machine import hardware
from ring_notebook.rank.rank_threads import (
    MKL,
    OMP,
    launched_thread_variables,
    thread_variables,
    threads_set,
    threads_started,
)

RINGRUN = str(Path(sys.executable).with_name("ringrun"))
SHOW = ["python", "-c", "import os; os.write(1, (os.environ.get('OMP_NUM_THREADS', '') + ';').encode())"]
SRUN = {"SLURM_PROCID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine of eight cores that nothing divides."""
    monkeypatch.setattr(hardware, "_PROCESSORS", tmp_path)
    monkeypatch.setattr(hardware, "_CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return monkeypatch


@pytest.mark.parametrize(
    ("ranks", "env", "variables"),
    [
        (2, {}, {"OMP_NUM_THREADS": "4"}),
        (3, {}, {"OMP_NUM_THREADS": "2"}),
        (9, {}, {"OMP_NUM_THREADS": "1"}),  # more ranks than cores
        (2, {"OMP_NUM_THREADS": "3"}, {}),
        (2, {"MKL_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "4"}),  # what is no MKL follows OMP_NUM_THREADS
        (2, {"SLURM_CPUS_PER_TASK": "2"}, {"OMP_NUM_THREADS": "2"}),
        (2, {"SLURM_CPUS_PER_TASK": "4", "SLURM_CPUS_ON_NODE": "4"}, {"OMP_NUM_THREADS": "2"}),
        (2, {"SLURM_CPUS_PER_TASK": "", "SLURM_CPUS_ON_NODE": "x"}, {"OMP_NUM_THREADS": "4"}),
    ],
)
def test_ranks_that_we_start(
    ranks: int, env: dict[str, str], variables: dict[str, str], eight_cores: pytest.MonkeyPatch
) -> None:
    assert thread_variables(ranks, env) == variables


@pytest.mark.parametrize(
    ("own", "of_launcher", "env", "threads"),
    [
        (range(8), range(8), {"MPI_LOCALNRANKS": "4"}, "2"),
        (range(8), range(8), {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "4"),
        (range(4), range(8), {"MPI_LOCALNRANKS": "2"}, "4"),  # bound to half of the machine
        (range(4), range(8), {"MPI_LOCALNRANKS": "8"}, "1"),  # bound there with others
        (range(2), range(8), SRUN, "2"),
        (range(8), range(8), SRUN, "4"),
        (range(8), range(8), {**SRUN, "SLURM_CPUS_PER_TASK": "3"}, "3"),
        (range(2, 5), range(2), {**SRUN, "SLURM_CPUS_PER_TASK": "3"}, "3"),  # Slurm's own processes have other cores
        (range(8), range(8), {**SRUN, "SLURM_NODEID": "3"}, "8"),
        (range(8), range(8), {**SRUN, "SLURM_NODEID": "4"}, None),
        (range(8), range(8), {}, None),
    ],
)
def test_ranks_that_a_launcher_starts(
    own: range, of_launcher: range, env: dict[str, str], threads: str | None, eight_cores: pytest.MonkeyPatch
) -> None:
    eight_cores.setattr(os, "sched_getaffinity", lambda pid: set(of_launcher if pid else own))
    assert launched_thread_variables(env).get("OMP_NUM_THREADS") == threads


def test_hyperthreads_and_quotas(eight_cores: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"cpu{number}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{number}" / "topology" / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    assert thread_variables(2, {}) == {"OMP_NUM_THREADS": "2"}
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    assert thread_variables(2, {}) == {"OMP_NUM_THREADS": "1"}


def test_one_line_where_there_is_something_to_say(eight_cores: pytest.MonkeyPatch) -> None:
    eight_cores.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_started(2, here=True).startswith("each of 2 ranks computes with 4 threads on this host's cores; set")
    assert threads_started(8, here=True).startswith("each of 8 ranks computes with 1 thread on")
    assert threads_started(8, here=False).startswith("each of 8 ranks computes with its share of its host's cores; set")
    assert threads_started(1, here=True) == ""
    eight_cores.setenv("OMP_NUM_THREADS", "2")
    assert threads_started(2, here=True) == ""


def test_what_a_user_has_set() -> None:
    assert [threads_set(env) for env in ({}, {"OMP_NUM_THREADS": "4,2"}, {"OMP_NUM_THREADS": "no"})] == [0, 4, 0]
    assert threads_set({"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "3"}) == 3


def test_the_doctor_warns_of_more_threads_than_cores(eight_cores: pytest.MonkeyPatch) -> None:
    eight_cores.delenv("OMP_NUM_THREADS", raising=False)
    assert doctor_checks._cores().status == "ok"
    eight_cores.setenv("OMP_NUM_THREADS", "1")
    assert doctor_checks._cores().status == "ok"
    eight_cores.setenv("OMP_NUM_THREADS", "4")
    check = doctor_checks._cores()
    assert check.status == "warn"
    assert check.found.endswith("gives 8 ranks 4 threads each")
    assert check.advice == "unset both: ranks then share the cores"


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    return monkeypatch


def share(ranks: int) -> str:
    return thread_variables(ranks, {})["OMP_NUM_THREADS"]


@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(["--elastic"], marks=pytest.mark.slow, id="elastic"),
        pytest.param(["--mpi-args=-genv UNUSED 1"], marks=pytest.mark.slow, id="mpiexec"),
    ],
)
def test_ringrun_divides_the_cores(options: list[str], nothing_set: pytest.MonkeyPatch) -> None:
    command = [RINGRUN, "--no-prefix", *options, "-np", "2", *SHOW]
    done = ran(command, check=True)
    assert done.stdout == 2 * f"{share(2)};"
    assert done.stderr == f"ringrun: {threads_started(2, here=True)}\n"
    nothing_set.setenv("OMP_NUM_THREADS", "7")
    done = ran(command, check=True)
    assert (done.stdout, done.stderr) == ("7;7;", "")


@pytest.mark.slow
def test_a_rank_that_starts_a_job_of_its_own_does_not_pass_its_share_on(nothing_set: pytest.MonkeyPatch) -> None:
    done = ran([RINGRUN, "--no-prefix", "-np", "2", RINGRUN, "-np", "1", *SHOW], check=True)
    assert done.stdout == 2 * f"{share(1)};"


@pytest.mark.slow
def test_functions_and_torch_follow(nothing_set: pytest.MonkeyPatch) -> None:
    def threads() -> int:
        """As torch says on one rank, which costs its import; as the variable says on the other."""
        return __import__("torch").get_num_threads() if os.environ["RING_RANK"] == "0" else int(os.environ[OMP])

    assert run(threads, n=2) == 2 * [int(share(2))]


@pytest.mark.slow
def test_engines_follow(nothing_set: pytest.MonkeyPatch, without_torch: None) -> None:
    from ring_notebook import Cluster

    with Cluster(2) as cluster:
        assert cluster.threads == 2 * [int(share(2))]
        assert [one.threads for one in cluster.status()] == cluster.threads
        cluster.run("import os; threads = os.environ['OMP_NUM_THREADS']").wait()
        assert cluster.pull("threads") == share(2)


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{OMP: "2", MKL: "1"}, {OMP: "1"}, {MKL: "1"}])
def test_the_names_in_the_environment_are_those_that_torch_reads(variables: dict[str, str]) -> None:
    code = "import torch; print(torch.get_num_threads())"
    env = {name: value for name, value in os.environ.items() if name not in (OMP, MKL)}
    done = ran([sys.executable, "-c", code], env=env | variables, check=True)
    assert done.stdout == "1\n"
