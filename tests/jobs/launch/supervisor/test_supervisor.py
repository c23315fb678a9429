"""Ranks of this host under our own supervisor: MPI, standard streams, what they leave, and what listens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.programs import executable, mpiexec_of, ran
from harness.waiting import LIMIT, SLEEPS, until
from ring_notebook.launch.launchers import own_launchers
from ring_notebook.launch.launchers.own_launchers import too_many_ranks

RINGRUN = [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix"]


def ringrun(*arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*RINGRUN, *arguments], input=given, capture_output=True, timeout=LIMIT, check=False)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@contextlib.contextmanager
def ranks_that_wait(tmp_path: Path, code: str, n: int = 2) -> Iterator[subprocess.Popen[str]]:
    """A job whose ranks run ``code``, say "ready" and wait."""
    program = tmp_path / "program.py"
    program.write_text(f"import os\n{code}\nos.write(1, b'ready %d\\n' % os.getpid())\n{SLEEPS}\n")
    command = [*RINGRUN, "-np", str(n), "python", str(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout is not None
            for _ in range(n):
                assert job.stdout.readline().startswith("ready")
            yield job
        finally:
            job.kill()


MPI = "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def listeners(pid: int) -> list[str]:
    """What processes of a family listen on, over TCP and UDP."""
    found = []
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [
                f"{connection.laddr.ip}:{connection.laddr.port} of {' '.join(process.cmdline())[:80]}"
                for connection in process.net_connections(kind="inet")
                if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE) and connection.laddr
            ]
    return found


def mpich_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("mpich_*")}


def test_mpi_connects_all_ranks() -> None:
    code = (
        "from mpi4py import MPI; import os; w = MPI.COMM_WORLD; "
        "os.write(1, b'%d %d %d\\n' % (w.size, w.allreduce(w.rank), w.Split_type(MPI.COMM_TYPE_SHARED).size))"
    )
    done = ringrun("-np", "3", "python", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3 3 3\n" * 3, "")


def test_a_job_listens_nowhere(tmp_path: Path) -> None:
    with ranks_that_wait(tmp_path, f"{MPI}\nfrom ring_notebook.api.basics import init; init()") as job:
        assert len(family(job.pid)) >= 4
        assert listeners(job.pid) == []


@pytest.mark.parametrize("elastic", [[], ["--elastic"]], ids=["mpi", "elastic"])
@pytest.mark.parametrize("size", [0, 6, 3_000_000])
def test_standard_input_goes_to_rank_0(elastic: list[str], size: int) -> None:
    done = ringrun(*elastic, "-np", "2", "wc", "-c", given=b"x" * size)
    assert (done.returncode, sorted(done.stdout.split())) == (0, sorted(["0", str(size)])), done.stderr


@pytest.mark.parametrize("victim", ["rank", "supervisor", "ringrun"])
def test_whatever_dies_mpich_leaves_no_files(victim: str, tmp_path: Path) -> None:
    before = mpich_files()
    with ranks_that_wait(tmp_path, MPI) as job:
        assert len(mpich_files() - before) >= 1, "of this job"
        supervisor = psutil.Process(job.pid).children()[0]
        rank = next(one for one in supervisor.children() if one.cmdline()[0] == "python")
        pid = {"rank": rank.pid, "supervisor": supervisor.pid, "ringrun": job.pid}[victim]
        files = mpich_files() - before
        os.kill(pid, signal.SIGKILL)
        until(lambda: files & mpich_files() == set())


def test_a_rank_that_never_calls_mpi_is_named_when_the_others_do() -> None:
    code = (
        "import os, sys\n"
        "if os.environ['PMI_RANK'] == '1': sys.exit(0)\n"
        "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"
    )
    done = ringrun("-np", "3", "python", "-c", code)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("failed first: exit code 0 in the middle of the job")
    assert "rank 1 on " in done.stderr.splitlines()[-1]


def test_the_code_of_an_mpi_abort() -> None:
    code = "from mpi4py import MPI; import time; MPI.COMM_WORLD.rank == 1 and MPI.COMM_WORLD.Abort(7); time.sleep(60)"
    done = ringrun("-np", "3", "python", "-c", code)
    assert done.returncode == 7
    assert "rank 1 on " in done.stderr.splitlines()[-1]


def test_a_job_within_a_rank_is_a_job_of_its_own() -> None:
    code = "from mpi4py import MPI; import os; os.write(1, b'%d\\n' % MPI.COMM_WORLD.size)"
    inner = [*RINGRUN, "-np", "2", "python", "-c", code]
    done = ringrun("-np", "1", *inner)
    assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.stderr


@pytest.mark.parametrize(
    ("redirection", "why"), [(">&-", "the stream is closed"), (">/dev/full", "No space left on device")]
)
def test_lost_output_is_an_error(redirection: str, why: str) -> None:
    shell = f'"$@" {redirection}'
    done = ran(["sh", "-c", shell, "sh", *RINGRUN, "-np", "2", "echo", "hi"])
    assert done.returncode == 1
    assert done.stderr == f"ringrun: output of the ranks was lost: {why}\n"


def test_all_streams_may_be_closed_when_nothing_is_printed() -> None:
    shell = '"$@" >&- 2>&- <&-'
    done = subprocess.run(["sh", "-c", shell, "sh", *RINGRUN, "-np", "2", "true"], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("files", "processes", "most"), [(20_000, 32_768, 2497), (1 << 20, 1000, 500), (10, 32_768, 0)]
)
def test_the_least_limit_counts(files: int, processes: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_launchers, "_open_files", lambda: files)
    monkeypatch.setattr(own_launchers, "processes_allowed", lambda: processes)
    assert too_many_ranks(most) == "" or most == 0
    assert f"at most {most}, limited by the " in too_many_ranks(most + 1)


def test_options_for_mpiexec_keep_their_quotes(tmp_path: Path) -> None:
    mpiexec = mpiexec_of('printf "%s\\n" "$@"', tmp_path)
    command = [*RINGRUN, "-np", "2", "--mpi-args", "-env X 'a b'", "true"]
    environment = {**os.environ, "RING_MPIEXEC": str(mpiexec)}
    done = ran(command, env=environment, timeout=LIMIT)
    assert done.stdout.splitlines()[:5] == ["-n", "2", "-env", "X", "a b"]


def test_a_program_behind_a_shell_script_ends_with_the_job(tmp_path: Path) -> None:
    script = executable(
        tmp_path / "train.sh",
        f"#!/bin/sh\n{sys.executable} -c \"print('ready', flush=True); __import__('time').sleep(100)\"\ntrue\n",
    )
    with subprocess.Popen([*RINGRUN, "-np", "2", str(script)], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for _ in range(2):
            assert job.stdout.readline() == "ready\n"
        started = family(job.pid)[1:]
        job.terminate()
        assert job.wait(LIMIT) == 128 + signal.SIGTERM
    gone, left = psutil.wait_procs(started, timeout=LIMIT)
    assert left == []
    assert len(gone) >= 5  # the supervisor, two shells and two programs


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As under nohup, when the terminal closes."""
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *RINGRUN, "-np", "2", "python", "-c"]
    program = "import sys; print('ready', flush=True); sys.stdin.readline(); __import__('time').sleep(1)"
    with subprocess.Popen([*command, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for _ in range(2):
            assert job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGHUP)
        job.communicate("go\n", timeout=LIMIT)
    assert job.returncode == 0
