"""Which MPI mpi4py loads."""

from __future__ import annotations

import subprocess
from typing import Literal

from ring_notebook.errors import MPIMissingError
from ring_notebook.own_python import code_command

__all__ = ["MPI", "loaded_mpi"]

MPI = Literal["MPICH", "Open MPI"]
"""An MPI, or all that are built like it: Intel, Cray and MVAPICH count as MPICH, Spectrum as Open MPI."""


def loaded_mpi() -> MPI:
    """The MPI that mpi4py loads, asked in a process of its own because loading it here could not be undone.

    Raises MPIMissingError when it cannot load one.
    """
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"
    try:
        done = subprocess.run(code_command(code), capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired as error:
        raise MPIMissingError(f"mpi4py does not load an MPI library within {error.timeout:g} s") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise MPIMissingError(f"mpi4py cannot load an MPI library ({reason}); `pip install 'ring-notebook[mpi]'`")
    return "Open MPI" if "Open MPI" in done.stdout or "Spectrum" in done.stdout else "MPICH"
