"""Which GPUs there are, in lists of a user, of NVIDIA's library and of the kernel's files, and who gets which."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from ring_notebook.machine import gpus as module
from ring_notebook.machine.gpus import VISIBLE, gpus, gpus_of_engine, gpus_of_script, sharing


class NvidiaManagement(ModuleType):
    """``pynvml`` of a machine whose GPUs hold these MIG instances; None is one that cannot be divided."""

    class NVMLError(Exception):
        pass

    def __init__(self, *machine: list[str | None] | None, driver: bool = True) -> None:
        super().__init__("pynvml")
        self._machine, self._driver, self.users = machine, driver, 0

    def nvmlInit(self) -> None:  # noqa: N802 - the library's names
        if not self._driver:
            raise self.NVMLError("Driver Not Loaded")
        self.users += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._machine)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        return number

    def nvmlDeviceGetUUID(self, handle: int | str) -> str:  # noqa: N802
        return handle if isinstance(handle, str) else f"GPU-{handle}"

    def _places(self, gpu: int) -> list[str | None]:
        places = self._machine[gpu]
        if places is None:
            raise self.NVMLError("Not Supported")
        return places

    def nvmlDeviceGetMigMode(self, gpu: int) -> tuple[int, int]:  # noqa: N802
        return int(bool(self._places(gpu))), 0

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: int) -> int:  # noqa: N802
        return len(self._places(gpu))

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: int, number: int) -> str:  # noqa: N802
        instance = self._places(gpu)[number]
        if instance is None:
            raise self.NVMLError("Not Found")
        return instance


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without a GPU, a list or NVIDIA's library; its folder is the kernel's list of GPUs."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(module, "_PROC", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),  # Slurm's word for none
        ("2,0", ["2", "0"]),
        ("0, 1", ["0", "1"]),
        ("0,-1,1", ["0"]),  # as CUDA reads it
        ("MIG-a,MIG-b", ["MIG-a", "MIG-b"]),
        ("GPU-7f,MIG-GPU-7f/1/0", ["GPU-7f", "MIG-GPU-7f/1/0"]),
    ],
)
def test_a_list_of_the_user_is_kept(visible: str, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", NvidiaManagement([], [], []))
    monkeypatch.setenv(VISIBLE, visible)
    assert gpus() == found


@pytest.mark.parametrize(
    ("machine_of_library", "found"),
    [
        ((), []),
        ((None, None), ["0", "1"]),
        (([], []), ["0", "1"]),  # could be divided
        ((["MIG-a", "MIG-b", None], []), ["MIG-a", "MIG-b", "GPU-1"]),
    ],
)
def test_what_the_library_finds(
    machine_of_library: tuple[list[str | None] | None, ...], found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = NvidiaManagement(*machine_of_library)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert gpus() == found
    assert library.users == 0


@pytest.mark.parametrize(("visible", "found"), [("0", []), ("0,1", []), ("GPU-7f", ["GPU-7f"]), ("MIG-a", ["MIG-a"])])
def test_numbers_are_no_gpus_without_a_driver(
    visible: str, found: list[str], machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    monkeypatch.setattr(module, "_PROC", tmp_path / "none")
    monkeypatch.setattr(module, "_DRIVERS", (str(tmp_path / "device"),))
    assert gpus() == found
    (tmp_path / "device").touch()
    assert gpus() == visible.split(",")


def test_without_the_library_or_its_driver(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus() == []
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (machine / bus).mkdir()
    assert gpus() == ["0", "1"]
    monkeypatch.setitem(sys.modules, "pynvml", NvidiaManagement(None, driver=False))
    assert gpus() == ["0", "1"]


@pytest.mark.parametrize(
    ("names", "by_rank"),
    [
        (["3", "5"], ["3,5", "5,3", "3,5"]),
        (["MIG-a", "MIG-b"], ["MIG-a", "MIG-b", "MIG-a"]),
        (["MIG-a", "GPU-1", "GPU-2"], ["MIG-a", "GPU-1,GPU-2", "GPU-2,GPU-1"]),
    ],
)
def test_an_engine_sees_its_own_gpu_first(names: list[str], by_rank: list[str]) -> None:
    assert [gpus_of_engine(rank, names) for rank in range(3)] == by_rank


def test_a_rank_of_a_script_sees_all_gpus_or_one_instance() -> None:
    assert [gpus_of_script(rank, ["0", "1"]) for rank in range(2)] == [{}, {}]
    assert gpus_of_script(0, []) == {}
    instances = ["MIG-a", "MIG-b"]
    assert [gpus_of_script(rank, instances)[VISIBLE] for rank in range(3)] == ["MIG-a", "MIG-b", "MIG-a"]


@pytest.mark.parametrize(
    ("ranks", "names", "said"),
    [(2, [], ""), (2, ["0", "1"], ""), (2, ["0"], "2 ranks share 1 GPU,"), (8, ["0", "1"], "8 ranks share 2 GPUs,")],
)
def test_more_ranks_than_gpus(ranks: int, names: list[str], said: str) -> None:
    assert sharing(ranks, names).startswith(said)
    assert bool(sharing(ranks, names)) is bool(said)
