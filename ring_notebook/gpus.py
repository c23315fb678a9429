"""The NVIDIA GPUs of this machine and their MIG instances, and which of them a rank uses; found without a framework.

Names are those of ``CUDA_VISIBLE_DEVICES``: numbers, or UUIDs that begin with ``GPU-`` or ``MIG-``. CUDA opens one MIG
instance per process, the first that it finds, so a rank that is to use another one must not see the first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

__all__ = ["VISIBLE", "gpus", "gpus_of_engine", "gpus_of_script", "sharing"]

VISIBLE = "CUDA_VISIBLE_DEVICES"

_PROC = Path("/proc/driver/nvidia/gpus")
_NAME = re.compile(r"\d+|(GPU|MIG)-\S+")
_MIG = "MIG-"


def gpus() -> list[str]:
    """The GPUs that this process may use: what ``CUDA_VISIBLE_DEVICES`` lists, else all of this machine.

    Of a GPU that is divided, its MIG instances, where the list does not name the GPU itself. They are found with the
    package ``nvidia-ml-py``; without it a divided GPU counts as one.
    """
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        return list(_valid(visible))
    named = _named_by_driver()
    if named is not None:
        return named
    try:
        return [str(number) for number in range(len(list(_PROC.iterdir())))]
    except OSError:
        return []


def gpus_of_engine(local_rank: int, names: Sequence[str]) -> str:
    """The ``CUDA_VISIBLE_DEVICES`` of an engine, which begins with its own GPU, so that ``cuda`` means it.

    The others follow: ranks map each other's memory. A MIG instance stands alone.
    """
    own = local_rank % len(names)
    if names[own].startswith(_MIG):
        return names[own]
    return ",".join(name for name in (*names[own:], *names[:own]) if not name.startswith(_MIG))


def gpus_of_script(local_rank: int, names: Sequence[str]) -> dict[str, str]:
    """The variable by which a rank of a script sees its own MIG instance.

    Empty where no GPU is divided: scripts choose theirs with ``torch.cuda.set_device(local_rank())``.
    """
    if not any(name.startswith(_MIG) for name in names):
        return {}
    return {VISIBLE: names[local_rank % len(names)]}


def sharing(ranks: int, names: Sequence[str]) -> str:
    """What it costs that ``ranks`` of one host have fewer GPUs than they are; empty where they have not."""
    count = len(names)
    if not 0 < count < ranks:
        return ""
    what = "1 GPU" if count == 1 else f"{count} GPUs"
    return f"{ranks} ranks share {what}, so sums of GPU tensors take the way through CPU memory"


def _valid(visible: str) -> Iterator[str]:
    """The names before the first that is none, such as -1: CUDA ignores all that follow it."""
    for name in visible.split(","):
        if not _NAME.fullmatch(name.strip()):
            return
        yield name.strip()


def _named_by_driver() -> list[str] | None:
    """What NVIDIA's management library finds; None without its package, its driver, or a GPU."""
    try:
        library = import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
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
    # Numbers are what users know. Beside MIG instances, which have none, only UUIDs say which GPU is meant.
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
