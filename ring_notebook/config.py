"""Every RING_* variable: typed, documented, checked and read once.

Nothing else reads the environment for settings. The native core gets ``isa`` when it is loaded, and ``wire``, ``spin``,
``inline``, ``segment``, ``staging``, ``stall_warning`` and ``fusion_threshold`` with each epoch
(`ring_notebook.core.native`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import lru_cache
from math import inf
from typing import Literal

__all__ = ["Config", "config"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of this process. `config` reads them from the environment once."""

    allocator: Literal["ring", "system"] = "ring"
    """RING_ALLOCATOR: what serves large tensors in ranks that `ringrun`, `run` and notebooks start. ``ring`` keeps
    their memory for later ones, and those that are reduced lie in ring memory; ``system`` is the C library."""

    algorithm: Literal["auto", "push", "ring"] = "auto"
    """RING_ALGORITHM: how ranks of one host reduce. ``push`` is another name of ``auto``: in memory that they share.
    ``ring``, for comparison and teaching, makes a host of each rank, so that tensors travel around a ring of them."""

    framework: str = ""
    """RING_FRAMEWORK: the framework of cells that name none, whose face engines load when they start; empty: torch."""

    fusion_threshold: int = 64 * _MIB
    """RING_FUSION_THRESHOLD (HOROVOD_FUSION_THRESHOLD): size of a gradient bucket, and of the operations with names
    that are carried out as one, in bytes."""

    wire: Literal["", "float16", "bfloat16"] = ""
    """RING_WIRE: what float32 tensors above 64 KiB are rounded to while a sum or average carries them between hosts.
    They are added in float32, and all ranks get the same values; within a host nothing is rounded."""

    overlap: Literal["auto", "inline", "thread"] = "auto"
    """RING_OVERLAP: reduce buckets on the progress thread during backward, or inline in ``step()``, which
    DistributedDataParallel on backend "ring" does in backward."""

    device: Literal["auto", "nccl", "host"] = "auto"
    """RING_DEVICE: what moves tensors on GPUs. ``nccl`` raises where NCCL cannot be used, ``host`` copies them to host
    memory and back; ``auto`` takes NCCL where all ranks can use it."""

    abort_limit: float = 5.0
    """RING_ABORT_LIMIT: seconds until an operation on a GPU that an abort does not end counts as never ending: its
    memory is never freed then, and its engine has to be restarted."""

    cuda_library: str = ""
    """RING_CUDA_LIBRARY: path of the CUDA driver, ``libcuda.so.1``; empty: the one that the system finds."""

    nccl_library: str = ""
    """RING_NCCL_LIBRARY: path of NCCL, ``libnccl.so.2``; empty: the one that PyTorch has loaded, or that of the
    packages nvidia-nccl-cu12 and nvidia-nccl-cu13."""

    timeout: float = 0.0
    """RING_TIMEOUT: seconds after which a waiting collective raises CollectiveTimeout; 0 and ``inf`` wait for ever."""

    start_timeout: float = -1.0
    """RING_START_TIMEOUT (HOROVOD_START_TIMEOUT): seconds that an mpiexec or srun has to start all ranks before it is
    killed, and that a rank waits for others at RING_RENDEZVOUS; 0 waits for ever. -1 means 600, and 0 where it has
    options of its own, which may hide what ranks say; at RING_RENDEZVOUS 120."""

    stall_warning: float = 10.0
    """RING_STALL_WARNING: seconds without progress after which a run says who waits for whom: a notebook's in its
    panel, a script on standard error, once for an operation or name and never for 0."""

    stop_limit: float = 300.0
    """RING_STOP_LIMIT: seconds that a rank of a notebook has to stop after an interrupt, before it is ended and started
    again; the others keep their variables. 0 waits for ever, and so does a cluster whose ranks MPI connects."""

    spin: float = -1.0
    """RING_SPIN: microseconds that a wait spins before it sleeps; -1 chooses by ranks and cores."""

    inline: int = 16 << 10
    """RING_INLINE: bytes up to which a tensor travels in its rank's mailbox, with one synchronization."""

    segment: int = 0
    """RING_SEGMENT: bytes of an ordinary tensor that are on their way through ring memory at a time; 0 means 256 KiB,
    and 512 KiB where ranks outnumber cores."""

    staging: Literal["auto", "cache", "memory"] = "auto"
    """RING_STAGING: whether segments are written into the cache that ranks may share, or past it into memory; ``auto``
    times both and takes the faster one."""

    memory: int = 0
    """RING_MEMORY: most bytes of ring memory a rank may take; 0 means what the machine has."""

    isa: Literal["", "baseline", "avx2", "avx512"] = ""
    """RING_ISA: instructions to reduce with instead of the best that the processor has. Where it lacks them, a warning
    names those in use."""

    repair: Literal["broadcast", "ask", "error"] = "broadcast"
    """RING_REPAIR: what an optimizer's first step does after a run that did not end well, where ranks differ in
    parameters, optimizer state or what else they share: ``broadcast`` those of a rank that is furthest on and say so,
    ``ask`` the user before, or raise an ``error``."""

    runs_dir: str = ".ring/runs"
    """RING_RUNS_DIR: where the kernel keeps the records of runs."""

    mpiexec: str = ""
    """RING_MPIEXEC: the mpiexec or srun to launch with, instead of the mpiexec beside the Python interpreter."""

    remote_shell: str = ""
    """RING_REMOTE_SHELL: the command that starts a program on another host, such as ``ssh -p 2222``; the host and the
    program follow it. Empty: ``srun``, ``blaunch`` or ``pbs_tmrsh`` in a job of Slurm, LSF or PBS, else ``ssh``."""

    interface: str = ""
    """RING_INTERFACE: the network interface of each host that ranks on several hosts connect through, such as eth0;
    empty: the one that leads to the other hosts."""

    transport: Literal["auto", "tcp", "mpi"] = "auto"
    """RING_TRANSPORT: what moves bytes between hosts. ``auto`` is TCP connections of our own, and MPI where all hosts
    of ranks that `ringrun`, `run` or a notebook has started have RDMA devices. Ranks of a site's mpiexec use MPI."""

    commit_dir: str = ""
    """RING_COMMIT_DIR: folder where elastic states put their commits, to resume after a death; empty: memory
    only, and ``.ring/commits`` in a notebook."""

    min_np: int = 1
    """RING_MIN_NP: fewest ranks that an elastic job continues with; ``ringrun --min-np`` sets it."""

    timeline: str = ""
    """RING_TIMELINE (HOROVOD_TIMELINE): file to write a Chrome trace to from the start."""

    status_file: str = ""
    """RING_STATUS_FILE: file to which this rank reports that it initialized, raised or exits; ``ringrun`` sets it."""


_ALIASES = {
    "fusion_threshold": "HOROVOD_FUSION_THRESHOLD",
    "start_timeout": "HOROVOD_START_TIMEOUT",
    "timeline": "HOROVOD_TIMELINE",
}
_CHOICES = {
    "allocator": ("ring", "system"),
    "algorithm": ("auto", "push", "ring"),
    "device": ("auto", "nccl", "host"),
    "isa": ("baseline", "avx2", "avx512"),
    "overlap": ("auto", "inline", "thread"),
    "repair": ("broadcast", "ask", "error"),
    "staging": ("auto", "cache", "memory"),
    "transport": ("auto", "tcp", "mpi"),
    "wire": ("float16", "bfloat16"),
}
_LEAST = {"spin": -1, "start_timeout": -1, "min_np": 1}
"""Of numbers whose least value is not 0."""
_MOST = {"inline": 1 << 30, "segment": 1 << 30, "memory": 1 << 62, "fusion_threshold": 1 << 62, "min_np": 1 << 30}
_KINDS = {int: "an integer", float: "a number"}


def _parse(name: str, variable: str, text: str, default: object) -> object:
    if name in _CHOICES and text not in _CHOICES[name]:
        raise ValueError(f"{variable}={text!r}: expected one of {', '.join(_CHOICES[name])}")
    if not isinstance(default, (int, float)):
        return text
    try:
        number = type(default)(text)
    except ValueError:
        raise ValueError(f"{variable}={text!r}: expected {_KINDS[type(default)]}") from None
    least, most = _LEAST.get(name, 0), _MOST.get(name, inf)
    if not number >= least:  # so put, because no comparison holds for a NaN
        raise ValueError(f"{variable}={text!r}: expected {least} or more")
    if number > most:
        raise ValueError(f"{variable}={text!r}: expected {most} or less")
    return number


@lru_cache(maxsize=1)
def config() -> Config:
    """The settings of this process. Raises ValueError that names the variable when one cannot be read."""
    values: dict[str, object] = {}
    for field in fields(Config):
        variable = f"RING_{field.name.upper()}"
        if variable not in os.environ and field.name in _ALIASES:
            variable = _ALIASES[field.name]
        text = os.environ.get(variable)
        if text:
            values[field.name] = _parse(field.name, variable, text, field.default)
    return Config(**values)  # type: ignore[arg-type]
