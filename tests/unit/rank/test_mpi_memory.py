"""MPICH's shared memory has no name once Ring Notebook has started: a rank that is killed leaves no file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ring_notebook.launch.launchers.mpi_library import loaded_mpi
from ring_notebook.launch.run_function import run


def test_names_are_gone_after_init() -> None:
    if loaded_mpi() != "MPICH":
        pytest.skip("only MPICH leaves names behind")

    def before_and_after() -> tuple[list[str], list[str], int]:
        from mpi4py import MPI

        from ring_notebook.core import world

        def mapped() -> list[str]:
            lines = Path("/proc/self/maps").read_text().splitlines()
            return sorted({line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/mpich_" in line})

        MPI.COMM_WORLD.Barrier()
        before = mapped()
        MPI.COMM_WORLD.Barrier()
        world.init()
        # MPI's memory still works: a sum over both ranks goes through it.
        return before, mapped(), MPI.COMM_WORLD.allreduce(1)

    for before, after, size in run(before_and_after, n=2):
        assert len(before) == 1
        assert not before[0].endswith("(deleted)")
        assert after == [f"{before[0]} (deleted)"]
        assert size == 2
