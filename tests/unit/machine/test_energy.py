"""Energy from a tree like that of the kernel, and from a management library like NVIDIA's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ring_notebook.machine.energy import Gpu, Packages, Used, amount, energy_text, used

RANGE = 262_143_328_850


class Tree:
    """A folder laid out as /sys/class/powercap is: each zone is a link to a folder of the devices."""

    def __init__(self, root: Path) -> None:
        self.root = root / "class" / "powercap"
        self.root.mkdir(parents=True)
        self.devices = root / "devices" / "virtual" / "powercap"
        (self.devices / "intel-rapl").mkdir(parents=True)
        (self.devices / "intel-rapl" / "enabled").write_text("1\n")
        (self.root / "intel-rapl").symlink_to(self.devices / "intel-rapl")

    def add(self, zone: str, name: str, energy: int) -> None:
        folder = self.devices / zone.partition(":")[0] / zone
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
        (folder / "energy_uj").write_text(f"{energy}\n")
        (self.root / zone).symlink_to(folder)

    def set(self, zone: str, energy: int) -> None:
        (self.root / zone / "energy_uj").write_text(f"{energy}\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A machine with two packages, whose parts are counted once."""
    made = Tree(tmp_path)
    made.add("intel-rapl:0", "package-0", 1_000_000)
    made.add("intel-rapl:0:0", "core", 500_000)
    made.add("intel-rapl:0:1", "dram", 0)
    made.add("intel-rapl:1", "package-1", RANGE - 1_000_000)
    made.add("intel-rapl:2", "psys", 0)
    made.add("intel-rapl-mmio:0", "package-0", 1_000_000)
    return made


def test_counts_each_package_and_its_memory_once(tree: Tree) -> None:
    packages = Packages(tree.root)
    assert packages.joules() == 0.0
    for zone, energy in {
        "intel-rapl:0": 4_000_000,
        "intel-rapl:0:0": 3_000_000,
        "intel-rapl:0:1": 500_000,
        "intel-rapl:2": 9_000_000,
        "intel-rapl-mmio:0": 4_000_000,
    }.items():
        tree.set(zone, energy)
    assert packages.joules() == pytest.approx(3.5)
    assert packages.joules() == pytest.approx(3.5)


def test_a_counter_that_begins_anew(tree: Tree) -> None:
    packages = Packages(tree.root)
    for turn in range(1, 4):
        tree.set("intel-rapl:1", 2_000_000)
        assert packages.joules() == pytest.approx(3.0 + (turn - 1) * RANGE * 1e-6)
        tree.set("intel-rapl:1", RANGE - 1_000_000)
        assert packages.joules() == pytest.approx(turn * RANGE * 1e-6)


def test_says_why_there_is_no_number(tree: Tree, tmp_path: Path) -> None:
    missing = Packages(tmp_path / "no powercap")
    assert missing.joules() is None
    assert missing.lacks == f"no counters of processors in {tmp_path / 'no powercap'}"
    packages = Packages(tree.root)
    tree.set("intel-rapl:0", 2_000_000)
    assert packages.joules() == pytest.approx(1.0)
    (tree.root / "intel-rapl:0" / "energy_uj").write_text("")
    assert packages.joules() is None
    assert "cannot be read: invalid literal" in packages.lacks
    tree.set("intel-rapl:0", 3_000_000)
    assert packages.joules() is None  # a part of the time is lost


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_counter_that_only_root_may_read(tree: Tree) -> None:
    (tree.root / "intel-rapl:1" / "energy_uj").chmod(0)
    assert Packages(tree.root).lacks == f"only root may read {tree.root / 'intel-rapl:1' / 'energy_uj'}"


class NvidiaManagement(ModuleType):
    """``pynvml`` of a machine whose GPUs have used so many millijoules; None for one that does not count."""

    def __init__(self, used: dict[str, int | None]) -> None:
        super().__init__("pynvml")
        self.used = used

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:  # noqa: N802 - the library's names
        pass

    def nvmlDeviceGetHandleByIndex(self, number: int) -> str:  # noqa: N802
        return list(self.used)[number]

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802
        return name

    def nvmlDeviceGetTotalEnergyConsumption(self, device: str) -> int:  # noqa: N802
        if (millijoules := self.used[device]) is None:
            raise self.NVMLError("Not Supported")
        return millijoules


def test_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    library = NvidiaManagement({"GPU-a": 5_000, "GPU-b": None})
    monkeypatch.setitem(sys.modules, "pynvml", library)
    for name in ("0", "GPU-a"):
        library.used["GPU-a"] = 5_000
        gpu = Gpu(name)
        library.used["GPU-a"] = 7_500
        assert gpu.joules() == pytest.approx(2.5)
    without = Gpu("GPU-b")
    assert without.joules() is None
    assert without.lacks == "GPU GPU-b does not count energy: Not Supported"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpu("0").lacks == "NVML is missing (pip install nvidia-ml-py)"


@pytest.mark.parametrize(
    ("ranks", "epochs", "expected", "says"),
    [
        ([{}, {}], 1.0, Used(None), ""),
        ([{"energy_lacks": "no root"}, {}], 1.0, Used(None, lacks="no root"), "energy not measured: no root"),
        (
            [{"joules_packages": 90.0, "samples": 50.0}, {"joules_gpu": 10.0, "samples": 50.0}],
            4.0,
            Used(100.0, 1.0, 25.0),
            "100 J, 1 J a sample, 25 J an epoch",
        ),
        (
            [{"joules_gpu": 2500.0, "samples": 0.0, "energy_lacks": "no root"}, {"energy_lacks": "no root"}],
            0.0,
            Used(2500.0, None, None, "no root"),
            "2.5 kJ (not measured: no root)",
        ),
    ],
)
def test_what_a_run_has_used(ranks: list[dict[str, Any]], epochs: float, expected: Used, says: str) -> None:
    assert used(ranks, epochs) == expected
    assert energy_text(expected) == says


def test_amounts() -> None:
    assert [amount(one) for one in (0.0123, 1.0, 999.0, 1234.5, 2.5e6)] == [
        "12.3 mJ",
        "1 J",
        "999 J",
        "1.23 kJ",
        "2.5 MJ",
    ]
