"""Every RING_* variable: typed, documented, checked and read once.

Nothing else reads the environment for settings. The native core gets ``isa`` when it is loaded, and ``wire``, ``spin``,
``inline``, ``segment``, ``staging``, ``stall_warning`` and ``fusion_threshold`` with each generation
(`ring_notebook.core.native`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import lru_cache
from math import inf
from typing import Literal, get_args, get_type_hints

_MIB = 1 << 20
_FOR_EVER = 1e6  # seconds; select takes no infinite number


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of this process. `config` reads them from the environment once."""

    allocator: Literal["ring", "system"] = "ring"
    """RING_ALLOCATOR: what malloc does with freed memory in ranks that `ringrun`, `run` and notebooks start. ``ring``
    keeps it for later tensors until the run ends, unless you have set malloc yourself; ``system`` changes nothing."""

    algorithm: Literal["auto", "push", "ring"] = "auto"
    """RING_ALGORITHM: how ranks of one host reduce. ``auto`` (or ``push``): in memory that they share. ``ring``, for
    comparison and teaching: each rank acts as a host of its own, and tensors travel around a ring, over TCP."""

    framework: str = ""
    """RING_FRAMEWORK: the framework of cells that use none by name; engines load it when they start. Empty: torch."""

    fusion_threshold: int = 64 * _MIB
    """RING_FUSION_THRESHOLD (HOROVOD_FUSION_THRESHOLD): bytes of a gradient bucket, and of operations with names that
    become one operation."""

    wire: Literal["", "float16", "bfloat16"] = ""
    """RING_WIRE: the type in which a sum or average of float32 tensors above 64 KiB travels between hosts. Values are
    added in float32, and all ranks get the same result. Within a host nothing is rounded."""

    overlap: Literal["auto", "inline", "thread"] = "auto"
    """RING_OVERLAP: ``thread`` reduces buckets on the progress thread during backward, ``inline`` at its end
    (DistributedDataParallel on backend "ring": in it). ``auto`` takes ``thread`` if a core is free."""

    gate: Literal["on", "off"] = "on"
    """RING_GATE: whether ranks compare what they call before each operation of groups of torch.distributed with other
    backends, such as Gloo and NCCL, and each program of JAX over devices of several ranks, and end the wait when a rank
    fails. ``off`` leaves these as PyTorch and JAX have them."""

    logical: int = 0
    """RING_LOGICAL: logical ranks of `prepare`, where it is given no number (``prepare(logical=...)``); ``ringrun
    --logical`` sets it. 0: none."""

    device: Literal["auto", "nccl", "host"] = "auto"
    """RING_DEVICE: what moves tensors on GPUs. ``nccl`` raises if NCCL cannot be used; ``host`` copies them to host
    memory and back; ``auto`` takes NCCL if all ranks can use it."""

    abort_limit: float = 5.0
    """RING_ABORT_LIMIT: seconds that an aborted operation on a GPU has to end. After that its memory is never freed,
    and its engine has to be restarted."""

    cuda_library: str = ""
    """RING_CUDA_LIBRARY: path of the CUDA driver, ``libcuda.so.1``. Empty: the one that the system finds."""

    nccl_library: str = ""
    """RING_NCCL_LIBRARY: path of NCCL, ``libnccl.so.2``. Empty: the one that PyTorch has loaded, or that of the
    packages nvidia-nccl-cu12 and nvidia-nccl-cu13."""

    timeout: float = 0.0
    """RING_TIMEOUT: seconds after which a waiting collective raises CollectiveTimeout; 0 and ``inf`` wait for ever."""

    start_timeout: float = -1.0
    """RING_START_TIMEOUT (HOROVOD_START_TIMEOUT): seconds that an mpiexec or srun has to start all ranks before it is
    killed, that other hosts have to answer our own supervisor, that the engines of a notebook have to register, and
    that a rank waits for others at RING_RENDEZVOUS. 0: for ever. -1: 600 (for ever if the mpiexec has options of its
    own, which may hide the output of ranks), 30 for hosts, 120 for engines and at RING_RENDEZVOUS."""

    checkpoint_timeout: float = 300.0
    """RING_CHECKPOINT_TIMEOUT: seconds for which a rank may write nothing to a checkpoint in the background; then that
    checkpoint is given up, and the next one is tried. ``inf`` waits for ever."""

    stall_warning: float = 10.0
    """RING_STALL_WARNING: seconds without progress until a run says which rank waits for which: in the panel, or for a
    script on standard error, once for each operation. 0: never in a script."""

    stop_limit: float = 300.0
    """RING_STOP_LIMIT: seconds that a rank of a notebook has to stop after an interrupt. Then it is ended and started
    again; the others keep their variables. 0: for ever, as in a cluster that `%ring heal` cannot serve."""

    spin: float = -1.0
    """RING_SPIN: microseconds that a wait spins before it sleeps; -1 chooses by ranks and cores."""

    inline: int = 16 << 10
    """RING_INLINE: bytes up to which a tensor travels in its rank's mailbox, with one synchronization."""

    segment: int = 0
    """RING_SEGMENT: bytes of an ordinary tensor that are in flight through ring memory at a time; 0 means 256 KiB, and
    512 KiB if ranks outnumber cores."""

    staging: Literal["auto", "cache", "memory"] = "auto"
    """RING_STAGING: whether segments are written into the cache that ranks may share, or past it into memory; ``auto``
    times both and takes the faster one."""

    memory: int = 0
    """RING_MEMORY: most bytes of ring memory a rank may take; 0 means what the machine has."""

    isa: Literal["", "baseline", "avx2", "avx512"] = ""
    """RING_ISA: the instruction set to reduce with. Empty: the best of the processor. If the processor lacks it, a
    warning names the one in use."""

    repair: Literal["broadcast", "ask", "error"] = "broadcast"
    """RING_REPAIR: what the first step of an optimizer does after a run that did not end well, if ranks differ in
    parameters, optimizer state or other shared values. ``broadcast`` sends those of the rank with the most steps and
    says so, ``ask`` asks the user first, ``error`` raises."""

    runs_dir: str = ".ring/runs"
    """RING_RUNS_DIR: where the kernel keeps the records of runs."""

    mpiexec: str = ""
    """RING_MPIEXEC: the mpiexec or srun to launch with, instead of the mpiexec beside the Python interpreter."""

    remote_shell: str = ""
    """RING_REMOTE_SHELL: the command that starts a program on another host, such as ``ssh -p 2222``. Host and program
    are appended. Empty: ``srun``, ``blaunch`` or ``pbs_tmrsh`` in a job of Slurm, LSF or PBS, else ``ssh``."""

    interface: str = ""
    """RING_INTERFACE: the network interface through which ranks of several hosts connect, such as eth0. Empty: the one
    that leads to the other hosts."""

    transport: Literal["auto", "tcp", "mpi"] = "auto"
    """RING_TRANSPORT: what moves bytes between hosts. ``auto``: MPI if all hosts have RDMA devices, else TCP, for ranks
    that `ringrun`, `run` or a notebook starts. Ranks of a site's mpiexec always use MPI."""

    commit_dir: str = ""
    """RING_COMMIT_DIR: folder for the commits of elastic states, to resume after a death. Empty: memory only, and
    ``.ring/commits`` in a notebook."""

    min_np: int = 1
    """RING_MIN_NP: the smallest number of ranks with which an elastic job continues; ``ringrun --min-np`` sets
    it."""

    timeline: str = ""
    """RING_TIMELINE (HOROVOD_TIMELINE): file for a Chrome trace of the whole job."""

    warmup: int = 0
    """RING_WARMUP: steps of a script after which its rank measures how its time is spent; ``ringrun`` sets it, and says
    at the end which ranks are slow, and why. 0: it does not."""

    status_file: str = ""
    """RING_STATUS_FILE: file to which this rank reports that it initialized, raised or exits; ``ringrun`` sets it."""

    operations_file: str = ""
    """RING_OPERATIONS_FILE: file in which this rank keeps its last 1024 operations; ``ringrun`` sets it. Empty: memory
    that ends with the rank."""

    trace_on_error: str = ""
    """RING_TRACE_ON_ERROR: file for a Chrome trace of the last operations of all ranks, which ``ringrun`` writes if the
    job fails."""

    def start_limit(self, default: float) -> float:
        """Seconds that something has to start: ``start_timeout``, or ``default`` where that is not set."""
        return default if self.start_timeout < 0 else min(self.start_timeout or _FOR_EVER, _FOR_EVER)


_ALIASES = {
    "fusion_threshold": "HOROVOD_FUSION_THRESHOLD",
    "start_timeout": "HOROVOD_START_TIMEOUT",
    "timeline": "HOROVOD_TIMELINE",
}
_LEAST = {"spin": -1, "start_timeout": -1, "min_np": 1}
"""Minima other than 0."""
_MOST = {"inline": 1 << 30, "segment": 1 << 30, "memory": 1 << 62, "fusion_threshold": 1 << 62, "min_np": 1 << 30}
_KINDS = {int: "an integer", float: "a number"}


def _parse(name: str, variable: str, text: str, default: object, choices: tuple[str, ...]) -> object:
    if choices and text not in choices:
        raise ValueError(f"{variable}={text!r}: expected one of {', '.join(filter(None, choices))}")
    if not isinstance(default, (int, float)):
        return text
    try:
        number = type(default)(text)
    except ValueError:
        raise ValueError(f"{variable}={text!r}: expected {_KINDS[type(default)]}") from None
    least, most = _LEAST.get(name, 0), _MOST.get(name, inf)
    if not number >= least:  # not `<`: a NaN must fail too
        raise ValueError(f"{variable}={text!r}: expected {least} or more")
    if number > most:
        raise ValueError(f"{variable}={text!r}: expected {most} or less")
    return number


@lru_cache(maxsize=1)
def config() -> Config:
    """The settings of this process. Raises ValueError with the name of a variable that cannot be read."""
    values: dict[str, object] = {}
    kinds = get_type_hints(Config)
    for field in fields(Config):
        variable = f"RING_{field.name.upper()}"
        if variable not in os.environ and field.name in _ALIASES:
            variable = _ALIASES[field.name]
        text = os.environ.get(variable)
        if text:
            values[field.name] = _parse(field.name, variable, text, field.default, get_args(kinds[field.name]))
    return Config(**values)  # type: ignore[arg-type]
