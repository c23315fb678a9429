"""The MPI launcher: which mpiexec to call, and how MPICH and Open MPI want to be told the same thing."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from ring_notebook.config import config
from ring_notebook.errors import MPIMissingError
from ring_notebook.launch.hosts import Host, check_slots

__all__ = ["Mpiexec", "find_mpiexec", "is_local", "loaded_flavor", "only_here"]

Flavor = Literal["mpich", "openmpi"]

# Open MPI refuses to start as root and to oversubscribe, and binds each rank to a core; none of that suits a
# notebook in a container. The PRTE names are those of Open MPI 5, the OMPI names those of 4.
_OPENMPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
# Open MPI hands no variable to another host unless told; Hydra hands over all.
_EXPORTED = (
    "CUDA",
    "HOROVOD",
    "LD_LIBRARY_PATH",
    "MKL",
    "NCCL",
    "OMP_",
    "PATH",
    "PYTHON",
    "RING",
    "TORCH",
    "UCX",
)


@dataclass(frozen=True, slots=True)
class Mpiexec:
    """An mpiexec on this host and whose it is (MPICH's Hydra, also Intel's, or Open MPI's)."""

    path: str
    flavor: Flavor

    def environment(self) -> dict[str, str]:
        """Variables that mpiexec itself needs, where the user has not set them."""
        wanted = _OPENMPI_ENV if self.flavor == "openmpi" else {}
        return {name: value for name, value in wanted.items() if name not in os.environ}

    def command(
        self,
        n: int,
        program: Sequence[str],
        hosts: Sequence[Host] = (),
        extra: Sequence[str] = (),
        exported: Iterable[str] = (),
    ) -> list[str]:
        """The command line that starts ``program`` as ``n`` ranks.

        Ranks fill ``hosts`` in order; no hosts, or this one alone, means without ssh. ``extra`` goes to
        mpiexec as it is. ``exported`` names variables that mpiexec will be started with and this process need not have:
        ranks on all hosts get them. Raises ValueError when the hosts have too few slots.
        """
        flags = ["-n", str(n)]
        if not only_here(hosts):
            check_slots(n, hosts)
            flags += [
                "-hosts" if self.flavor == "mpich" else "--host",
                ",".join(f"{host.name}:{host.slots}" for host in hosts),
            ]
            if self.flavor == "openmpi":
                names = {name for name in os.environ if name.startswith(_EXPORTED)}.union(exported)
                flags += [word for name in sorted(names) for word in ("-x", name)]
        return [self.path, *flags, *extra, *program]


def find_mpiexec() -> Mpiexec:
    """RING_MPIEXEC, else the mpiexec beside this Python (its MPI wheel), else the one on the PATH.

    Raises MPIMissingError when there is none, when it does not run, and when it belongs to another MPI than
    mpi4py loads: ranks started so would each believe to be alone.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    path = config().mpiexec or (str(beside) if beside.exists() else shutil.which("mpiexec"))
    if not path:
        raise MPIMissingError(
            "no mpiexec beside this Python or on the PATH; "
            "`pip install mpich`, or set RING_MPIEXEC to your site's mpiexec"
        )
    found = Mpiexec(path, _flavor(path))
    if path != str(beside):
        loaded = loaded_flavor()
        if loaded != found.flavor:
            raise MPIMissingError(
                f"{path} is {found.flavor}'s and mpi4py loads {loaded}; "
                f"set RING_MPIEXEC to the mpiexec of {loaded}, or install mpi4py for {found.flavor}"
            )
    return found


@lru_cache(maxsize=8)
def _flavor(path: str) -> Flavor:
    try:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except OSError as error:
        raise MPIMissingError(f"{path} does not run ({error}); set RING_MPIEXEC to your mpiexec") from error
    return "openmpi" if "Open MPI" in version or "OpenRTE" in version else "mpich"


def loaded_flavor() -> Flavor:
    """Whose MPI mpi4py loads, asked in a process of its own because loading it here could not be undone."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise MPIMissingError(f"mpi4py cannot load an MPI library ({reason}); `pip install mpich`")
    return "openmpi" if "Open MPI" in done.stdout else "mpich"


def only_here(hosts: Sequence[Host]) -> bool:
    """Whether a job on ``hosts`` runs on this host alone; no hosts mean this one."""
    return not hosts or (len(hosts) == 1 and is_local(hosts[0].name))


def is_local(name: str) -> bool:
    """Whether ``name`` is this host."""
    here = socket.gethostname()
    return name in {"localhost", "127.0.0.1", "::1", here, here.split(".")[0]}
