"""MPICH's shared memory has no name once Ring Notebook has started: a rank that is killed leaves no file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.programs import ran
from ring_notebook.launch.launchers.launcher import loaded_mpi

RANK = """
import os
from pathlib import Path
from mpi4py import MPI
from ring_notebook.core import world
def mapped():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/mpich_" in line})
MPI.COMM_WORLD.Barrier()
before = mapped()
MPI.COMM_WORLD.Barrier()
world.init()
assert len(before) == 1 and not before[0].endswith("(deleted)")
assert mapped() == [f"{before[0]} (deleted)"]
# MPI's memory still works: a sum over both ranks goes through it.
os.write(1, b"%d\\n" % MPI.COMM_WORLD.allreduce(1))
"""


def test_names_are_gone_after_init() -> None:
    """Under the site's own mpiexec; our supervisor removes them itself, when the job has ended."""
    if loaded_mpi() != "MPICH":
        pytest.skip("only MPICH leaves names behind")
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    done = ran([mpiexec, "-n", "2", sys.executable, "-c", RANK])
    assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.stderr
