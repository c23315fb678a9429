"""Which launcher starts the ranks of a job."""

from __future__ import annotations

import errno
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from ring_notebook.config import config
from ring_notebook.errors import MPIMissingError
from ring_notebook.launch.launchers.launcher import Launcher, loaded_mpi
from ring_notebook.launch.launchers.own_launchers import Own, check_shared_memory
from ring_notebook.launch.launchers.site_launchers import Aprun, Hydra, Jsrun, OpenMPI, Pals, Srun
from ring_notebook.launch.supervisor.growth import NOT_ELASTIC, Elastic

_MPICH = "HYDRA build details"
"""What the mpiexec of MPICH prints first with --version."""
# Launchers that are known by the names of their programs.
_NAMED: dict[str, type[Launcher]] = {"aprun": Aprun, "jsrun": Jsrun}
_SECONDS_TO_ANSWER = 20.0
# Launchers by what they print first with --version. Hydra, which many vendors build, comes last.
_LAUNCHERS: tuple[tuple[str, type[Launcher]], ...] = (
    (r".*\((Open MPI|OpenRTE|PRRTE)\)", OpenMPI),
    (r"slurm\S* \d", Srun),
    (r"(?is).*\bPALS\b|mpiexec version \d", Pals),
    (r"", Hydra),
)


def find_launcher(elastic: Elastic = NOT_ELASTIC, mpi_args: Sequence[str] = (), requests: str = "") -> Launcher:
    """RING_MPIEXEC, else the mpiexec beside this Python (its MPI wheel), else the one on the PATH.

    Our own supervisor takes the place of the MPICH wheel's mpiexec, which listens on all interfaces without
    authentication, unless ``mpi_args`` has options for mpiexec. It also starts ranks where mpi4py or an mpiexec is
    missing, and all ``elastic`` jobs. ``requests`` is the pipe through which it takes requests to
    start ranks again.

    Raises MPIMissingError when there is none that takes ``mpi_args``, when it does not run, and when it belongs to
    another MPI than mpi4py loads: each rank would be a job of size 1. Raises ValueError for ``mpi_args`` of an elastic
    job, and RingError where a limit of this process lets no rank start.
    """
    check_shared_memory()
    if elastic.min_np:
        if mpi_args:
            raise ValueError("an elastic job starts without mpiexec; leave out the options for mpiexec")
        return Own(elastic=elastic)
    beside = Path(sys.executable).with_name("mpiexec")
    path = config().mpiexec or (str(beside) if beside.exists() else shutil.which("mpiexec"))
    if not config().mpiexec and find_spec("mpi4py") is None:
        path = None  # no program here can use what an mpiexec starts
    if not path:
        if mpi_args:
            raise MPIMissingError(
                "options for mpiexec, and no mpiexec beside this Python or on the PATH; "
                "`pip install 'ring-notebook[mpi]'`, or set RING_MPIEXEC to your site's mpiexec or srun"
            )
        return Own(requests=requests)
    version = _version(path)
    # Other MPIs whose mpiexec is a Hydra, such as Intel's, need not be what our supervisor knows.
    if path == str(beside) and not config().mpiexec and version.startswith(_MPICH) and not mpi_args:
        return Own(requests=requests)
    kinds = (kind for pattern, kind in _LAUNCHERS if re.match(pattern, version))
    launcher = (_NAMED.get(Path(path).name) or next(kinds))(path)
    if path != str(beside) and (loaded := loaded_mpi()) not in launcher.mpis:
        mpis = " or ".join(launcher.mpis)
        raise MPIMissingError(
            f"{path} starts ranks of {mpis}, and mpi4py loads {loaded}; "
            f"set RING_MPIEXEC to the mpiexec of {loaded}, or install mpi4py for {mpis}"
        )
    return launcher


@lru_cache(maxsize=8)
def _version(path: str) -> str:
    command = [path, "--version"]
    try:
        # Output to a file: a pipe would stay open while a child of a launcher that hangs has it.
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            subprocess.run(command, stdout=output, stderr=subprocess.DEVNULL, timeout=_SECONDS_TO_ANSWER, check=False)
            output.seek(0)
            return output.read()
    except subprocess.TimeoutExpired:
        why = f"`{path} --version` does not answer within {_SECONDS_TO_ANSWER:g} s"
        raise MPIMissingError(f"{why}; set RING_MPIEXEC to your mpiexec or srun") from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN):
            raise  # it is not the launcher's fault
        raise MPIMissingError(f"{path} does not run ({error}); set RING_MPIEXEC to your mpiexec or srun") from error
