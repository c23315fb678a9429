"""Jobs that start badly: signals while ranks start, hosts that lack something, launchers that hang, inner jobs."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from harness.programs import executable, mpiexec_of, ran
from harness.waiting import LIMIT
from ring_notebook.errors import ClusterError, MPIMissingError
from ring_notebook.launch.launchers import find_launcher as finding
from ring_notebook.launch.launchers import own_launchers
from ring_notebook.launch.launchers.find_launcher import find_launcher
from ring_notebook.launch.supervisor.inherited_variables import ADDED, without_outer_job
from ring_notebook.notebook.cluster import processes
from ring_notebook.notebook.cluster.cluster import Cluster

RINGRUN = [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix"]


def supervisor(setup: str, *arguments: str, shell: str = '"$@"') -> subprocess.CompletedProcess[str]:
    """The supervisor in a process of its own, after ``setup``."""
    code = (
        "from ring_notebook.analysis import time_limits\nfrom ring_notebook.launch.connections import mpi_host\n"
        "from ring_notebook.launch import supervise\nfrom ring_notebook.launch.supervisor import local_ranks\n"
        f"{setup}\nsupervise.main()"
    )
    return ran(["bash", "-c", shell, "bash", sys.executable, "-c", code, *arguments], timeout=LIMIT)


@pytest.mark.parametrize("min_np", ["0", "1"], ids=["mpi", "elastic"])
def test_a_signal_that_comes_while_ranks_start_reaches_all_of_them(min_np: str) -> None:
    """The first rank sends it; a rank that does not get it sleeps for longer than the test may take."""
    rank = "import os; raise SystemExit(int(os.environ.get('PMI_RANK') or os.environ['RING_RANK']))"
    script = f'{sys.executable} -S -c "{rank}" && kill -TERM $PPID; exec sleep 1000'
    slow_start = (
        "import time; start = local_ranks.start_rank\n"
        "def later(*a, **k): process = start(*a, **k); time.sleep(0.2); return process\n"
        "local_ranks.start_rank = later; time_limits.STOPPING = 1000.0"
    )
    done = supervisor(slow_start, "4", min_np, "", "", "sh", "-c", script)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")


@pytest.mark.parametrize(
    ("setup", "shell", "min_np", "said"),
    [
        (
            "import pathlib; mpi_host.FOLDER = pathlib.Path('/no/such')",
            '"$@"',
            "0",
            "this host cannot start the ranks: No such file or directory: /no/such/ring-",
        ),
        (
            "",
            'ulimit -n 40; "$@"',
            "1",
            "this host cannot start the ranks: Too many open files; this process may have 40, raise it with ",
        ),
    ],
    ids=["no shared memory", "descriptors"],
)
def test_what_this_host_lacks_is_not_blamed_on_the_program(setup: str, shell: str, min_np: str, said: str) -> None:
    done = supervisor(setup, "8", min_np, "", "", "/bin/sleep", "100", shell=shell)
    assert done.returncode == 1
    assert done.stderr.startswith(f"ringrun: {said}")
    assert len(done.stderr.splitlines()) == 1
    assert "sleep" not in done.stderr


def test_as_many_ranks_as_the_limits_allow_start() -> None:
    """The count of descriptors for each rank is the true one; more are refused, with the usage."""
    code = "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"
    shell = 'ulimit -n 72; "$@"; echo $?'
    for n, code_of_job in ((6, "0"), (7, "2")):
        command = ["bash", "-c", shell, "bash", *RINGRUN, "-np", str(n), "python", "-c", code]
        done = ran(command, timeout=LIMIT)
        assert done.stdout == f"{code_of_job}\n", done.stderr
    assert "7 ranks are more than this host can start: at most 6, limited by the open files" in done.stderr


def test_few_descriptors_are_said_in_words() -> None:
    command = ["bash", "-c", 'ulimit -Sn 8; "$@"', "bash", *RINGRUN, "--elastic", "-np", "2", "true"]
    done = ran(command, timeout=LIMIT)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert line.endswith("this process may open too few files, raise `ulimit -n`")


@pytest.mark.parametrize(
    ("said", "own"),
    [("HYDRA build details:", True), ("Intel(R) MPI Library for Linux* OS, Version 2021.15", False)],
)
def test_only_the_wheel_of_mpich_is_replaced(
    said: str, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(tmp_path / "mpiexec", f"#!/bin/sh\necho '{said}'\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.delenv("RING_MPIEXEC", raising=False)
    assert (type(find_launcher()).__name__ == "Own") is own


def test_a_launcher_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it has started something that has its output."""
    mpiexec = executable(tmp_path / "mpiexec", "#!/bin/sh\nsleep 3 & wait\n")
    monkeypatch.setattr(finding, "_SECONDS_TO_ANSWER", 0.2)
    with pytest.raises(MPIMissingError, match=r"mpiexec --version` does not answer within 0.2 s; set RING_MPIEXEC"):
        finding._version(str(mpiexec))


def test_a_cluster_that_is_too_large_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_launchers, "processes_allowed", lambda: 6)
    with pytest.raises(ClusterError, match="5 ranks are more than this host can start: at most 3"):
        Cluster(5).start()


def is_controller(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE and "controller" in " ".join(process.cmdline())
    return False


def test_a_cluster_whose_engines_do_not_start_has_ended_when_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Callable[..., None]
) -> None:
    """With its controller, which had started."""

    def fail(*_: object) -> None:
        raise OSError("no engines today")

    settings(runs_dir=tmp_path / "runs")
    monkeypatch.setattr(processes, "engines", fail)
    before = {*threading.enumerate()}, {*psutil.Process().children(recursive=True)}
    with pytest.raises(OSError, match="no engines today"):
        Cluster(2).start()
    assert "ring-cluster" not in [thread.name for thread in {*threading.enumerate()} - before[0]]
    assert [child for child in {*psutil.Process().children(recursive=True)} - before[1] if is_controller(child)] == []


SHOW = "import json, os; os.write(1, json.dumps(dict(os.environ)).encode() + b'\\n')"
OF_ONE_JOB = (
    *("PMI_", "RING_RANK", "RING_SIZE", "RING_RENDEZVOUS", "RING_MIN_NP", "RING_STATUS_FILE", "UCX_", ADDED),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "GLOO_"),
)


def names_of_a_job(environment: str) -> set[str]:
    return {name for name in json.loads(environment) if name.startswith(OF_ONE_JOB)}


@pytest.mark.slow
@pytest.mark.parametrize("outer", [[], ["--elastic"]], ids=["mpi", "elastic"])
def test_a_job_within_a_rank_inherits_nothing_of_the_outer_one(outer: list[str], tmp_path: Path) -> None:
    """Ranks of our supervisor have what theirs have anywhere, and a site's launcher gets none of it."""
    mpiexec = mpiexec_of(f"exec {sys.executable} -c {shlex.quote(SHOW)}", tmp_path)

    def shown(*command: str) -> str:
        done = ran([*RINGRUN, *command], timeout=LIMIT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    job = [*RINGRUN, "-np", "1", "python", "-c", SHOW]
    assert names_of_a_job(shown(*outer, "-np", "1", *job)) == names_of_a_job(shown(*job[len(RINGRUN) :]))
    site = ["env", f"RING_MPIEXEC={mpiexec}", *RINGRUN, "-np", "2", "-H", "a:1,b:1", "true"]
    assert names_of_a_job(shown(*outer, "-np", "1", *site)) == set()


def test_variables_that_the_user_has_set_reach_a_job_within_a_job() -> None:
    outer = {"UCX_TLS": "tcp,self", "UCX_POSIX_DIR": "/dev/shm/x", ADDED: "UCX_POSIX_DIR", "PMI_RANK": "1", "A": "b"}
    assert without_outer_job(outer) == {"UCX_TLS": "tcp,self", "A": "b"}


@pytest.mark.parametrize(
    "says_who",
    [
        "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS SLURM_NPROCS SLURM_STEP_ID SLURM_STEPID",
        "PMI_RANK PMI_SIZE PMIX_RANK PALS_RANKID PALS_LOCAL_RANKID PALS_LOCAL_SIZE ALPS_APP_PE",
        "OMPI_COMM_WORLD_RANK OMPI_UNIVERSE_SIZE JSM_NAMESPACE_RANK MV2_COMM_WORLD_RANK PBS_TASKNUM",
        "GROUP_RANK ROLE_RANK TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE",
    ],
)
def test_a_batch_script_does_not_say_who_a_rank_is(says_who: str) -> None:
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_CPUS_PER_TASK": "4",
        "PBS_NODEFILE": "/nodes",
        "LSB_MCPU_HOSTS": "a 2",
        "OMPI_MCA_btl": "self",
    }
    assert without_outer_job({**job, **dict.fromkeys(says_who.split(), "0")}) == job


def test_ranks_of_a_batch_script_have_their_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    code = (
        "import os; print(*(os.environ.get(name) for name in ('RANK', 'SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_JOB_ID')))"
    )
    done = ran([*RINGRUN, "-np", "2", "python", "-c", code], timeout=LIMIT)
    assert sorted(done.stdout.splitlines()) == ["0 None None 7", "1 None None 7"], done.stderr


SCRIPT = """\
#!/bin/sh
{python} -c "import signal, time
signal.signal(signal.SIGTERM, lambda *_: (print('ended by', 15, flush=True), exit()))
print('ready', flush=True)
while True: time.sleep(0.05)"  # a signal that comes just before a long sleep begins would not end it
true
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_program_behind_a_script_ends_with_its_wrapper(signum: signal.Signals, tmp_path: Path) -> None:
    """As ranks of mpiexec and srun have one."""
    script = executable(tmp_path / "train.sh", SCRIPT.format(python=sys.executable))
    wrapper = [sys.executable, "-m", "ring_notebook.launch.supervisor.rank_wrapper", str(script)]
    with subprocess.Popen(wrapper, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        rank.send_signal(signum)
        said = rank.communicate(timeout=LIMIT)[0]
    assert said == ("ended by 15\n" if signum == signal.SIGTERM else "")


def test_a_terminal_that_has_gone_is_no_failure() -> None:
    """As for any reader that has gone: an elastic job continues, and what it would have said is lost."""
    ours, theirs = os.openpty()
    code = "import os; from ring_notebook.core import world; world.init(); os._exit(world.current().rank)"
    with open(theirs, "wb") as terminal:
        job = subprocess.Popen([*RINGRUN, "--elastic", "-np", "2", "python", "-c", code], stderr=terminal)
    os.close(ours)
    assert job.wait(LIMIT) == 0


def test_a_second_stop_kills_a_function_that_ignores_the_first(tmp_path: Path) -> None:
    """No rank is left then; the first stop alone gives the ranks time to end."""
    code = """
import contextlib, os, signal, threading, time
from ring_notebook.analysis import time_limits
from ring_notebook.launch.run_function import run
time_limits.GRACE = 1000.0
def stubborn():
    import os, signal, time
    signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"{folder}/{os.getpid()}", "w").close(); time.sleep(1000)
def stop():
    while len(os.listdir(folder)) < 2: time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT); time.sleep(1); os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=stop, daemon=True).start()
try:
    run(stubborn, n=2)
except KeyboardInterrupt:
    def alive(name):
        with contextlib.suppress(OSError):
            return open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[0] != "Z"
    until = time.monotonic() + 5  # no more than a moment; the first stop alone takes twice as long
    while any(map(alive, os.listdir(folder))) and time.monotonic() < until: time.sleep(0.05)
    print(list(filter(alive, os.listdir(folder))))
"""
    command = [sys.executable, "-c", f"folder = {str(tmp_path)!r}\n{code}"]
    done = ran(command, timeout=LIMIT)
    assert done.stdout == "[]\n", done.stderr


def test_a_caller_that_says_nothing_does_not_hold_up_the_ranks_of_run(tmp_path: Path) -> None:
    """On several hosts anybody can connect to the port. Here it is a file, in a folder whose name is long."""
    code = """
import socket
from ring_notebook.launch import run_function
from ring_notebook.machine.os_calls import short_path
start = run_function.Job
def with_a_silent_caller(program, n, hosts, env, *rest, **named):
    address = next(value for name, value in env.items() if name == run_function.ADDRESS)
    callers.append(socket.socket(socket.AF_UNIX))
    with short_path(address) as short: callers[0].connect(short)
    return start(program, n, hosts, env, *rest, **named)
callers = []
run_function.Job = with_a_silent_caller
print(run_function.run(lambda: 7, n=2))
"""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    done = ran([sys.executable, "-c", code], timeout=LIMIT, env={**os.environ, "TMPDIR": str(folder)})
    assert done.stdout == "[7, 7]\n", done.stderr
