"""The interface that every launcher implements, and the environment variables that it sends to other hosts."""

from __future__ import annotations

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from ring_notebook.errors import MPIMissingError
from ring_notebook.launch.launchers.hosts import Host
from ring_notebook.machine.own_python import code_command, module_command

MPI = Literal["MPICH", "Open MPI"]
"""An MPI, or all that are built like it: Intel, Cray and MVAPICH count as MPICH, Spectrum as Open MPI."""

# Variables with these prefixes reach ranks on other hosts also where a launcher sends no others.
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
class Launcher(ABC):
    """A program at ``path`` that starts the ranks of one job, ends with them, and passes signals on to them."""

    mpis: ClassVar[tuple[MPI, ...]] = ()
    """The MPIs whose ranks it can connect; every other MPI would start jobs of size 1."""

    foreign: ClassVar[bool] = True
    """Whether it is not ours, and so does not say how its ranks end."""

    path: str

    def __str__(self) -> str:
        return self.path

    @property
    def starts_again(self) -> bool:
        """Whether ranks that have died can be started again, and those that live continue without them."""
        return False

    def command(
        self,
        program: Sequence[str],
        n: int,
        hosts: Sequence[Host] = (),
        extra: Sequence[str] = (),
        exported: Iterable[str] = (),
    ) -> list[str]:
        """The command line that starts ``program`` as ``n`` ranks.

        Ranks fill ``hosts`` in order; no hosts, or this one alone, mean this host. ``extra`` are options for the
        launcher. ``exported`` names variables of its environment that ranks on all hosts get, besides those of this
        process. Raises ValueError when the hosts have too few slots.
        """
        return [self.path, *self.options(n, hosts, exported), *extra, *program]

    @abstractmethod
    def options(self, n: int, hosts: Sequence[Host], exported: Iterable[str]) -> list[str]:
        """What stands between its own path and the user's options for it."""

    def supervised(self, program: Sequence[str]) -> list[str]:
        """``program`` in a process that reports how it failed, where the launcher itself does not."""
        wrapper = module_command("ring_notebook.launch.supervisor.rank_wrapper")
        return [*(wrapper if self.foreign else []), *program]

    def environment(self) -> dict[str, str]:
        """Variables that the launcher itself needs, where the user has not set them."""
        return {}


def exported_names(extra: Iterable[str]) -> list[str]:
    """The variables of this process that ranks on other hosts need, and ``extra`` ones; sorted."""
    return sorted({name for name in os.environ if name.startswith(_EXPORTED)}.union(extra))


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
