"""Processes that ranks fork: they end as they like, and the job of their parents goes on as if they were not there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from harness.programs import ran
from ring_notebook.launch.run_function import run

PROGRAM = """
import atexit, contextlib, multiprocessing, os, subprocess, sys, time, warnings
warnings.simplefilter("ignore")  # Python's, of forks beside threads
MPI
from ring_notebook.core import world
from ring_notebook.core import metrics
from ring_notebook.errors import RingError

world.init()
atexit.register(os.write, 1, b"handler of the user\\n")
rank = world.current().rank
metrics.log(loss=1.0)
metrics.log(loss=2.0)  # printed at the end of rank 0, and of no other process
barrier = world.current().communicator.barrier
parent = os.getpid()


def collective():
    try:
        barrier()
    except ValueError as error:
        assert "a forked process cannot use its parent's communicator" in str(error)
        sys.exit(7)


def again():
    world.close()
    try:
        world.init()
    except RingError as error:
        assert "forked by a rank" in str(error)
        sys.exit(8)


def bare(code):
    raise SystemExit(code)


ENDS = [
    (lambda: sys.exit(0), 0),
    (lambda: sys.exit(3), 3),
    (lambda: bare(4), 4),
    (lambda: None, 0),
    (lambda: 1 / 0, 1),
    (collective, 7),
    (again, 8),
]
for end, code in ENDS:
    if rank == 1:
        child = os.fork()
        if child == 0:
            break
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code, code
        process = multiprocessing.get_context("fork").Process(target=end)
        process.start()
        process.join()
        assert process.exitcode == code, (process.exitcode, code)
        with contextlib.suppress(subprocess.SubprocessError):  # it does not start where the function raises
            subprocess.run(["true"], preexec_fn=end)
    time.sleep(0.2)  # for what a child says of its parent
    barrier()
if os.getpid() != parent:
    end()
else:
    if "mpi4py.MPI" in sys.modules:
        assert sys.modules["mpi4py.MPI"].COMM_WORLD.allreduce(1) == 2
    os.write(1, b"rank %d is well\\n" % rank)
"""
RINGRUN = [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix", "-np", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "mpi"),
    [
        ((), ""),  # it is loaded by us
        ((), "from mpi4py import MPI"),
        (("--elastic",), ""),  # which does without
        (("--mpi-args", "-genv UNUSED 1"), ""),  # of mpiexec
    ],
)
def test_a_job_goes_on_whatever_its_children_do(options: tuple[str, ...], mpi: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("MPI\n", f"{mpi}\n", 1))
    done = ran([*RINGRUN, *options, sys.executable, str(program)])
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    # Exit handlers of the user are copied as Python does it, ours are not.
    assert lines == [*["handler of the user"] * 9, "rank 0 is well", "rank 1 is well", *lines[-2:]]
    assert [line.split("  ")[1] for line in lines[-2:]] == ["loss 1", "loss 2"]
    assert done.stderr.count("ZeroDivisionError") == 2, "a traceback of each child that raised"


def test_a_function_of_run_returns_once() -> None:
    def forks() -> tuple[int, int]:
        child = os.fork()
        if child == 0:
            return 0, 0
        return child, os.waitpid(child, 0)[1]

    def exits() -> int:
        child = os.fork()
        if child == 0:
            sys.exit("words of the child")
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    results = run(forks, n=2)
    assert all(child and status == 0 for child, status in results), results
    assert run(exits, n=2) == [1, 1]
