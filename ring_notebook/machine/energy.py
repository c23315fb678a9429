"""Energy that processors and GPUs of this machine have used, in joules, from their own counters.

Processors: RAPL, through Linux's powercap tree. Counted are each package and its memory (``dram``), which is not in the
package's count; other entries, such as its cores, are in it. GPUs: NVML. Both count whatever runs there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from ring_notebook.machine.gpus import handle_of, management_library

POWERCAP = Path("/sys/class/powercap")
PACKAGES, GPU, LACKS = "joules_packages", "joules_gpu", "energy_lacks"
"""Names under which a rank reports joules, and why some were not measured."""


class Packages:
    """The packages of this machine. ``lacks`` says why they are not measured; empty while they are."""

    def __init__(self, root: Path = POWERCAP) -> None:
        """``root`` is laid out as /sys/class/powercap is."""
        self.lacks = ""
        self._lock = Lock()  # ranks read from two threads
        self._joules = 0.0
        self._zones: dict[Path, tuple[int, int]] = {}  # last reading and greatest value, in microjoules
        try:
            for zone in sorted(root.glob("intel-rapl:*")):  # AMD's have this name too
                name = (zone / "name").read_text().strip()
                if name.startswith("package") or name == "dram":
                    self._zones[zone] = _microjoules(zone), int((zone / "max_energy_range_uj").read_text())
            if not self._zones:
                self.lacks = f"no counters of processors in {root}"
        except (OSError, ValueError) as error:
            self.lacks = _why_not(error)

    def joules(self) -> float | None:
        """Joules since this object was made; None where they are not measured.

        Notices one overflow of a counter between two calls; at full power a counter overflows within minutes.
        """
        with self._lock:
            try:
                for zone, (before, most) in () if self.lacks else self._zones.items():
                    now = _microjoules(zone)
                    self._joules += (now - before if now >= before else now - before + most) * 1e-6
                    self._zones[zone] = now, most
            except (OSError, ValueError) as error:
                self.lacks = _why_not(error)
            return None if self.lacks else self._joules


def _microjoules(zone: Path) -> int:
    return int((zone / "energy_uj").read_text())


def _why_not(error: Exception) -> str:
    if isinstance(error, PermissionError):
        return f"only root may read {error.filename}"
    return f"the counters of processors cannot be read: {error}"


class Gpu:
    """One GPU, by its name in CUDA_VISIBLE_DEVICES. ``lacks`` is as that of `Packages`."""

    def __init__(self, name: str) -> None:
        self.lacks = ""
        self._device: Any = None
        self._library = management_library()
        self._first = 0
        if self._library is None:
            self.lacks = "NVML is missing (pip install nvidia-ml-py)"
            return
        try:
            self._device = handle_of(self._library, name)
            self._first = self._library.nvmlDeviceGetTotalEnergyConsumption(self._device)
        except self._library.NVMLError as error:  # an old GPU, or a part of one (MIG)
            self.lacks = f"GPU {name} does not count energy: {error}"

    def joules(self) -> float | None:
        """Joules since this object was made; None where they are not measured."""
        if self.lacks or self._library is None:
            return None
        try:
            return float(self._library.nvmlDeviceGetTotalEnergyConsumption(self._device) - self._first) * 1e-3
        except self._library.NVMLError as error:
            self.lacks = f"the GPU counts no energy any more: {error}"
            return None


@dataclass(frozen=True, slots=True)
class Used:
    """Joules of a run, None where nothing was measured; of each sample and epoch, None where these are not known.

    ``lacks`` says what was not measured, and why.
    """

    joules: float | None
    per_sample: float | None = None
    per_epoch: float | None = None
    lacks: str = ""


NOT_MEASURED = Used(None)


def used(ranks: Sequence[Mapping[str, Any]], epochs: float = 0.0) -> Used:
    """The energy of a run of so many ``epochs``, from the reports of its ranks."""
    lacks = "; ".join(dict.fromkeys(str(one[LACKS]) for one in ranks if one.get(LACKS)))
    readings = [float(one[name]) for one in ranks for name in (PACKAGES, GPU) if isinstance(one.get(name), int | float)]
    if not readings:
        return Used(None, lacks=lacks)
    joules = sum(readings)
    samples = sum(float(one["samples"]) for one in ranks if isinstance(one.get("samples"), int | float))
    return Used(joules, joules / samples if samples > 0 else None, joules / epochs if epochs > 0 else None, lacks)


def amount(joules: float) -> str:
    """An amount of energy in words: ``3.2 kJ``."""
    for unit, factor in (("MJ", 1e6), ("kJ", 1e3), ("J", 1.0)):
        if joules >= factor:
            return f"{joules / factor:.3g} {unit}"
    return f"{joules * 1e3:.3g} mJ"


def energy_text(energy: Used) -> str:
    """In words: ``1.2 kJ, 0.3 J a sample, 400 J an epoch``, or why it was not measured; empty without a reason."""
    if energy.joules is None:
        return f"energy not measured: {energy.lacks}" if energy.lacks else ""
    parts = [amount(energy.joules)]
    parts += [f"{amount(energy.per_sample)} a sample"] if energy.per_sample is not None else []
    parts += [f"{amount(energy.per_epoch)} an epoch"] if energy.per_epoch is not None else []
    return f"{', '.join(parts)}{f' (not measured: {energy.lacks})' if energy.lacks else ''}"
