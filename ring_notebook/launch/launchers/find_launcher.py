"""Which launcher starts the ranks of a job."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from ring_notebook.config import config
from ring_notebook.errors import MPIMissingError
from ring_notebook.launch.launchers.hosts import Host, only_here
from ring_notebook.launch.launchers.hydra import Hydra
from ring_notebook.launch.launchers.launcher import Launcher
from ring_notebook.launch.launchers.local import Local
from ring_notebook.launch.launchers.mpi_library import loaded_mpi
from ring_notebook.launch.launchers.openmpi import OpenMPI
from ring_notebook.launch.launchers.srun import Srun

__all__ = ["find_launcher"]

# Launchers by what they print first with --version. Hydra, which many vendors build, comes last.
_LAUNCHERS: tuple[tuple[str, type[Launcher]], ...] = (
    (r".*\((Open MPI|OpenRTE|PRRTE)\)", OpenMPI),
    (r"slurm\S* \d", Srun),
    (r"", Hydra),
)


def find_launcher(hosts: Sequence[Host] = (), min_np: int = 0, mpi_args: Sequence[str] = ()) -> Launcher:
    """RING_MPIEXEC, else the mpiexec beside this Python (its MPI wheel), else the one on the PATH.

    On this host alone our own supervisor takes the place of the MPICH wheel's mpiexec, which listens on all interfaces
    without authentication, unless ``mpi_args`` has options for mpiexec. It starts all elastic jobs, those with a
    ``min_np``.

    Raises MPIMissingError when there is none, when it does not run, and when it belongs to another MPI than
    mpi4py loads: each rank would be a job of size 1.
    """
    if min_np:
        return Local(min_np=min_np)
    beside = Path(sys.executable).with_name("mpiexec")
    path = config().mpiexec or (str(beside) if beside.exists() else shutil.which("mpiexec"))
    if not path:
        raise MPIMissingError(
            "no mpiexec beside this Python or on the PATH; "
            "`pip install mpich`, or set RING_MPIEXEC to your site's mpiexec or srun"
        )
    launcher = _kind(path)(path)
    own = path == str(beside) and not config().mpiexec
    if own and launcher.mpis == Local.mpis and only_here(hosts) and not mpi_args:
        return Local()
    if path != str(beside) and (loaded := loaded_mpi()) not in launcher.mpis:
        mpis = " or ".join(launcher.mpis)
        raise MPIMissingError(
            f"{path} starts ranks of {mpis}, and mpi4py loads {loaded}; "
            f"set RING_MPIEXEC to the mpiexec of {loaded}, or install mpi4py for {mpis}"
        )
    return launcher


@lru_cache(maxsize=8)
def _kind(path: str) -> type[Launcher]:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except OSError as error:
        raise MPIMissingError(f"{path} does not run ({error}); set RING_MPIEXEC to your mpiexec or srun") from error
    return next(kind for pattern, kind in _LAUNCHERS if re.match(pattern, said))
