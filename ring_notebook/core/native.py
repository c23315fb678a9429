"""The compiled core ``ring_notebook._core``, and its settings.

The import raises CoreMissingError when the core is not compiled. It reads no setting: a script may set variables
between its imports and `init`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from warnings import warn

from ring_notebook.config import config
from ring_notebook.errors import CoreMissingError
from ring_notebook.machine.gpus import may_share_by_nccl


def _is_editable() -> bool:
    """Whether the package is installed so that its sources in a clone are those to import (PEP 610)."""
    from importlib.metadata import PackageNotFoundError, distribution

    with suppress(PackageNotFoundError):
        return '"editable": true' in (distribution("ring-notebook").read_text("direct_url.json") or "").lower()
    return False


def _where_to_find_it() -> str:
    here = Path(__file__).parents[1]
    for folder in () if _is_editable() else sys.path:
        if (other := Path(folder, "ring_notebook").absolute()) != here and any(other.glob("_core.*")):
            return (
                f"Python imports the sources in {here}, which are not compiled, before {other}: run in another folder"
            )
    return "Compile it with `pip install -e .` in a clone, or `pip install --force-reinstall ring-notebook`"


try:
    from ring_notebook import _core as core
except ImportError as error:
    raise CoreMissingError(
        f"the native core of Ring Notebook cannot be loaded ({error}). {_where_to_find_it()}."
    ) from error

__all__ = [
    "DeviceReport",
    "core",
    "device_report",
    "devices",
    "has_devices",
    "knows_transport",
    "operation_log",
    "options",
    "warn_of_host_memory",
]


def select_instructions(select: Callable[[str], str], asked: str) -> None:
    """Make the core reduce with these instructions; warn where the processor lacks them."""
    used = select(asked)
    if asked and used != asked:
        warn(f"RING_ISA={asked}: this processor has no {asked}; {used} is used", RuntimeWarning, stacklevel=3)


@lru_cache(maxsize=1)
def _select_instructions() -> None:
    select_instructions(core.select_isa, config().isa)


def options(*, warns: bool = True) -> core.Options:
    """The settings of a generation. Selects the instructions of ``RING_ISA``, or warns where the processor lacks them.

    With ``warns``, operations that wait for long are reported on standard error.
    """
    _select_instructions()
    settings = config()
    return core.Options(
        wire=settings.wire,
        staging=settings.staging,
        inline_bytes=settings.inline,
        segment_bytes=settings.segment,
        spin=settings.spin,
        stall_warning=settings.stall_warning if warns else 0.0,
        fusion_threshold=settings.fusion_threshold,
    )


@lru_cache(maxsize=1)
def operation_log() -> core.OperationLog:
    """The log of this process's last operations, in all its generations."""
    return core.OperationLog(config().operations_file)


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """The libraries that this process would use for tensors on GPUs."""

    driver: str
    """Version of CUDA that the driver supports, like "13.0"; empty where it cannot be used."""
    nccl: str
    """Version of NCCL, like "2.28.9"; empty where it cannot be used."""
    names: tuple[str, ...]
    """Names of the GPUs, in the order of their indices."""
    errors: tuple[str, ...]
    """Why the driver or NCCL cannot be used."""


# The variable overrides the core's own setting; NCCL would then wait for a rank that never comes.
_BLOCKING = "NCCL_COMM_BLOCKING=1 makes NCCL wait where nothing can interrupt it; unset it"


@lru_cache(maxsize=1)
def devices() -> core.Devices:
    """The devices of this process, with its settings. Loads no library before one is needed."""
    settings = config()
    return core.Devices(
        choice=settings.device,
        cuda_library=settings.cuda_library,
        nccl_library=settings.nccl_library,
        nccl_otherwise=_packaged_nccl(),
        refusal=_BLOCKING if os.environ.get("NCCL_COMM_BLOCKING", "") == "1" else "",
        shares=may_share_by_nccl(),
        abort_limit=settings.abort_limit,
    )


def device_report() -> DeviceReport:
    """Versions and errors of the driver and NCCL. Loads both, and touches no GPU."""
    found = devices().report()
    errors = [found[key] for key in ("driver_error", "nccl_error") if key in found]
    return DeviceReport(
        driver=found.get("driver", ""),
        nccl=found.get("nccl", ""),
        names=tuple(found.get("devices", ())),
        errors=tuple(errors),
    )


@lru_cache(maxsize=1)
def has_devices() -> bool:
    """Whether the core can use tensors on CUDA devices: the driver can be loaded, unlike under ROCm."""
    return bool(device_report().driver)


def knows_transport(transport: tuple[str, str], rank: int) -> bool:
    """Whether the ranks of a group have agreed on a transport for tensors on devices (`Communicator.device_transport`).

    The first rank warns if it is host memory and RING_DEVICE does not ask for that.
    """
    kind, reason = transport
    if kind == "host" and rank == 0 and config().device == "auto":
        warn_of_host_memory(reason)
    return kind != ""


@lru_cache(maxsize=16)
def warn_of_host_memory(reason: str) -> None:
    """Warn, once for each reason, that tensors on GPUs go through host memory, why, and what that costs."""
    warn(
        f"tensors on GPUs go through host memory, because of {reason}. Every operation copies them there and back, and "
        "the CPU adds them: expect it to take several times as long as by NCCL. RING_DEVICE=host says that this is "
        "meant; ringrun --doctor checks what NCCL needs.",
        RuntimeWarning,
        stacklevel=7,
    )


def _packaged_nccl() -> str:
    """The NCCL of the packages nvidia-nccl-cu12 and -cu13, which install the same file; empty where there is none."""
    try:
        found = find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return ""
    for folder in (found.submodule_search_locations or []) if found else []:
        library = Path(folder) / "lib" / "libnccl.so.2"
        if library.exists():
            return str(library)
    return ""
