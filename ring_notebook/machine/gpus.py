"""The NVIDIA GPUs of this machine and their MIG instances, and which of them a rank uses; needs no framework.

Names are those of ``CUDA_VISIBLE_DEVICES``: numbers, or UUIDs that begin with ``GPU-`` or ``MIG-``. CUDA opens one MIG
instance per process, the first that it sees. A rank that uses another instance must not see the first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARED_BY_NCCL = "NCCL_MULTI_RANK_GPU_ENABLE"

_PROC = Path("/proc/driver/nvidia/gpus")
_DRIVERS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
"""Devices of other GPU drivers: NVIDIA's in sandboxes and on Jetson, WSL2's, AMD's."""
_NAME = re.compile(r"\d+|(GPU|MIG)-\S+")
_MIG = "MIG-"


def gpus() -> list[str]:
    """The GPUs that this process may use: those in ``CUDA_VISIBLE_DEVICES``, else all of this machine.

    Without a driver, numbers in that variable do not count: many set it on every machine. UUIDs always count. A divided
    GPU counts as its MIG instances, unless the list names the GPU itself. The package ``nvidia-ml-py`` finds them;
    without it a divided GPU counts as one.
    """
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        names = list(_valid(visible))
        return [] if all(name.isdigit() for name in names) and not _has_driver() else names
    named = _named_by_driver()
    if named is not None:
        return named
    try:
        return [str(number) for number in range(len(list(_PROC.iterdir())))]
    except OSError:
        return []


def gpus_of_engine(local_rank: int, names: Sequence[str]) -> str:
    """The ``CUDA_VISIBLE_DEVICES`` of an engine. Its own GPU comes first, so that ``cuda`` means it.

    The others follow, because ranks map each other's memory. A MIG instance is listed alone.
    """
    own = local_rank % len(names)
    if names[own].startswith(_MIG):
        return names[own]
    return ",".join(name for name in (*names[own:], *names[:own]) if not name.startswith(_MIG))


def gpus_of_script(local_rank: int, names: Sequence[str]) -> dict[str, str]:
    """The variable that shows a rank of a script its own MIG instance.

    Empty if no GPU is divided: scripts then call ``torch.cuda.set_device(local_rank())``.
    """
    if not any(name.startswith(_MIG) for name in names):
        return {}
    return {VISIBLE: names[local_rank % len(names)]}


def may_share_by_nccl() -> bool:
    """Whether ranks that share a GPU may connect by NCCL; NCCL of 2.30 and newer reads this variable itself."""
    return os.environ.get(SHARED_BY_NCCL) == "1"


def sharing(ranks: int, names: Sequence[str]) -> str:
    """What it costs if ``ranks`` of one host share GPUs; empty if they do not, or may do so by NCCL."""
    count = len(names)
    if not 0 < count < ranks or may_share_by_nccl():
        return ""
    what = "1 GPU" if count == 1 else f"{count} GPUs"
    return f"{ranks} ranks share {what}, so sums of GPU tensors go through CPU memory"


def _has_driver() -> bool:
    return _PROC.exists() or any(map(os.path.exists, _DRIVERS)) or bool(_named_by_driver())


def _valid(visible: str) -> Iterator[str]:
    """The names before the first invalid one, such as -1: CUDA ignores all names after it."""
    for name in visible.split(","):
        if not _NAME.fullmatch(name.strip()):
            return
        yield name.strip()


def management_library() -> ModuleType | None:
    """NVIDIA's management library (NVML), initialized; None without its package or its driver."""
    try:
        library = import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    return library


def handle_of(library: ModuleType, name: str) -> Any:
    """NVML's handle of a GPU by its name. Raises the ``NVMLError`` of that library."""
    by_index = name.isdigit()
    return library.nvmlDeviceGetHandleByIndex(int(name)) if by_index else library.nvmlDeviceGetHandleByUUID(name)


def _named_by_driver() -> list[str] | None:
    """What NVML finds; None without it, or without a GPU."""
    library = management_library()
    if library is None:
        return None
    try:
        try:
            return _found(library)
        finally:
            library.nvmlShutdown()
    except library.NVMLError:
        return None


def _found(library: ModuleType) -> list[str]:
    names: list[str] = []
    divided = False
    for number in range(library.nvmlDeviceGetCount()):
        gpu = library.nvmlDeviceGetHandleByIndex(number)
        instances = list(_instances(library, gpu))
        divided = divided or bool(instances)
        names += instances or [library.nvmlDeviceGetUUID(gpu)]
    # Users know GPUs by number. MIG instances have no number, so beside them only UUIDs are unambiguous.
    return names if divided else [str(number) for number in range(len(names))]


def _instances(library: ModuleType, gpu: object) -> Iterator[str]:
    try:
        enabled, _ = library.nvmlDeviceGetMigMode(gpu)
    except library.NVMLError:  # a GPU that cannot be divided
        return
    for number in range(library.nvmlDeviceGetMaxMigDeviceCount(gpu) if enabled else 0):
        try:
            instance = library.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
        except library.NVMLError:  # no instance has this number: there are fewer, and larger ones
            continue
        yield library.nvmlDeviceGetUUID(instance)
