"""Which rank a job that has failed names, with real processes, and that one whose ranks end well names none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness.programs import ringrun
from ring_notebook.analysis.time_limits import LINGER
from ring_notebook.launch.launchers.find_launcher import find_launcher
from ring_notebook.launch.supervisor import rank_wrapper
from ring_notebook.rank.rank_status import StatusFile

PROGRAM = """
import atexit, os, signal, sys, time
from ring_notebook.core import world
how = sys.argv[1]
folder, elastic = os.path.dirname(sys.argv[0]), "RING_MIN_NP" in os.environ
world.init()
rank, size = world.current().rank, world.current().size
barrier = world.current().communicator.barrier
barrier()
left = os.path.join(folder, "rank 1 has left")
def tell_that_rank_1_has_left():  # a handler that runs before those of the job
    world._leave_job()
    with open(left + ".new", "w") as file: file.write(str(os.getpid()))
    os.rename(left + ".new", left)
def wait_until_rank_1_has_left():
    while not os.path.exists(left): time.sleep(0.01)
    # Only ranks of an elastic job exit alone: the supervisor has seen it once the process is gone.
    while elastic and os.path.exists("/proc/" + open(left).read()): time.sleep(0.01)
if how == "leave while it computes" and rank == 1: atexit.register(tell_that_rank_1_has_left)
if rank == 1:
    if how == "flee while it computes": os._exit(0)
    if how in ("exit", "exit while it computes"): sys.exit(3)
    if how in ("leave", "leave while it computes"): sys.exit(0)
    if how == "leave slowly":
        atexit.register(time.sleep, 600)
        atexit.register(world._leave_job)
        sys.exit(0)
    if how == "interrupted, slowly":
        atexit.register(time.sleep, 600)
        raise KeyboardInterrupt
if how in ("flee while it computes", "exit while it computes"): time.sleep(600)
if how == "leave while it computes": wait_until_rank_1_has_left()
if how in ("exit", "leave", "leave slowly", "interrupted, slowly"): barrier()
if how == "all flee": os._exit(0)
if how == "shutdown": world.close()
if how == "sys.exit": sys.exit(0)
if how == "child" and os.fork() == 0: os._exit(0)
"""
SILENT = ["end", "shutdown", "sys.exit", "all flee", "child", "leave while it computes"]


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("flee while it computes", 1, "exit code 0 in the middle of the job"),
        ("exit", 3, "exit code 3"),
        ("exit while it computes", 3, "exit code 3"),
        ("leave", 1, "exit code 0 in the middle of the job"),
        ("leave slowly", 1, "exit code 0 in the middle of the job"),
        ("interrupted, slowly", 130, "exit code 130"),
    ],
)
def test_the_rank_that_the_others_missed_is_named(how: str, code: int, words: str, program: str) -> None:
    done = ringrun("-np", "3", "python", program, how)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == f"ringrun: rank 1 on {os.uname().nodename} failed first: {words}"
    assert how != "exit" or "stopped because rank 1 exited with code 3" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif("MPICH" not in find_launcher().mpis, reason="tests Hydra, the mpiexec of MPICH")
def test_an_exit_code_ends_a_job_of_mpiexec_while_the_others_compute(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RING_MPIEXEC", str(Path(sys.executable).with_name("mpiexec")))
    done = ringrun("-np", "2", "python", program, "exit while it computes")
    assert done.returncode == 3, done.stderr
    assert done.stderr.splitlines()[-1] == f"ringrun: rank 1 on {os.uname().nodename} failed first: exit code 3"


@pytest.mark.slow
def test_nobody_has_finished_where_the_others_failed_for_want_of_one(program: str) -> None:
    done = ringrun("--elastic", "-np", "3", "python", program, "leave")
    assert done.returncode == 1
    assert "ringrun: rank 1 failed: exit code 0. " in done.stderr
    assert "0 ranks of 3 left, fewer than the 1 of --min-np" in done.stderr


@pytest.mark.parametrize("elastic", [[], ["--elastic"]], ids=["mpi", "elastic"])
@pytest.mark.parametrize("how", SILENT)
def test_ranks_that_end_well_are_not_blamed(elastic: list[str], how: str, program: str) -> None:
    done = ringrun(*elastic, "-np", "2", "python", program, how)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_rank_reports() -> None:
    file = StatusFile()
    assert not file.read().left_early
    module = "from ring_notebook.rank.rank_status import report_error, report_status\n"
    child = f"{module}report_status('exiting'); report_error(ValueError())"
    code = (
        f"{module}import subprocess, sys; report_status('initialized')\n"
        # Reports of its child, which inherits the environment, are ignored.
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | file.variables, check=True)
    status = file.read()
    assert (status.left_early, status.aborted, status.failed_at(1)) == (True, False, 0.0)


@pytest.mark.parametrize("finalized", [False, True])
def test_hydra_learns_of_an_exit_before_it_sees_it(finalized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a child has inherited the connection; a rank whose MPI has closed it does not linger."""
    lingered: list[float] = []
    monkeypatch.setattr(rank_wrapper.time, "sleep", lingered.append)
    theirs, ours = socket.socketpair()
    with theirs, ours.dup():
        if finalized:
            theirs.shutdown(socket.SHUT_RDWR)
        rank_wrapper._hang_up(ours.detach())
        theirs.setblocking(False)
        assert theirs.recv(1) == b""
    assert lingered == ([] if finalized else [LINGER])
