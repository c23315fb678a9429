"""The environment variables in which torch.distributed looks for its ranks, under torchrun's names."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from ring_notebook.rank.rank_threads import slurm_tasks

MASTER = "RING_MASTER"
"""The variable in which a launcher tells ranks the host of rank 0 and a port of it, as ``host:port``."""
STARTED_AGAIN = "RING_STARTED_AGAIN"
"""Set for a process that joins running ranks, maybe in place of a dead one, and so has no MPI. For an engine it is the
number of the formation that it was started for."""
NO_MPI = "RING_NO_MPI"
"""Why MPICH would end this process when it starts; unset where it would not."""
_LOOPBACK, _USUAL_PORT = "127.0.0.1", 29500
OF_LAUNCHERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "ALPS_APP_PE")
"""The variables in which launchers of MPI tell a process its rank."""
# What MPICH, HPE Cray's PALS, Open MPI and Slurm tell a rank: its rank, the size, and both on its host.
_LAUNCHERS = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


def loopback() -> str:
    """A `MASTER` for ranks that are all on this host. Nothing of ours listens at its port."""
    return f"{_LOOPBACK}:{free_port()}"


def master(env: Mapping[str, str] = os.environ) -> str:
    """The `MASTER` of this process; one that all ranks of a host agree on where no launcher of ours has given it."""
    return env.get(MASTER) or f"{_LOOPBACK}:{_USUAL_PORT}"


def variables_of_rank(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`rank_variables` of a rank that an MPI launcher or Slurm has started; empty where these do not tell."""
    if tasks := slurm_tasks(env):  # Slurm sets SLURM_NTASKS_PER_NODE only for the option of that name
        env = {"SLURM_NTASKS_PER_NODE": str(tasks), **env}
    for names in _LAUNCHERS:
        values = [env.get(name, "") for name in names]
        if all(value.isdigit() for value in values):
            rank, size, local_rank, local_size = map(int, values)
            return rank_variables(rank, size, local_rank, local_size, master(env))
    return {}


def rank_variables(rank: int, size: int, local_rank: int, local_size: int, master: str) -> dict[str, str]:
    """The environment variables of rank ``rank`` of ``size``.

    On a single host Gloo listens on loopback only.
    """
    address, _, port = master.rpartition(":")
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": address.strip("[]"),
        "MASTER_PORT": port,
        MASTER: master,
    }
    if size == local_size:
        variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return variables


def bracketed(name: str) -> str:
    """A host's name or address, to be followed by a colon: an IPv6 address is in brackets."""
    return f"[{name}]" if ":" in name else name


def free_port() -> int:
    """A port of this host at which nothing listens now."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        port: int = probe.getsockname()[1]
    return port


def is_of_this_job(rank: int, size: int, env: Mapping[str, str] = os.environ) -> bool:
    """Whether these are the rank and the size that we gave to this process, and it has changed no variable of ours.

    False for ranks that a program starts itself within a rank, as ``torchrun`` and ``torch.multiprocessing`` do.
    """
    now = f"{env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}"
    own = (env.get("RANK"), env.get("WORLD_SIZE"), env.get(MASTER, "").replace("[", "").replace("]", ""))
    return own == (str(rank), str(size), now) and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
