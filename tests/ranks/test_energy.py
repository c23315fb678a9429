"""One rank of a host reads its packages."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from ring_notebook.core import energy_of_rank
from ring_notebook.machine.energy import Packages


def test_a_package_counts_once_for_all_ranks_of_its_host(
    hvd: ModuleType, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(hvd.broadcast_object(str(tmp_path_factory.mktemp("powercap"))))
    zone = root / "intel-rapl:0"
    if hvd.rank() == 0:
        zone.mkdir()
        for name, value in {"name": "package-0", "max_energy_range_uj": "10000000", "energy_uj": "9000000"}.items():
            (zone / name).write_text(f"{value}\n")
    hvd.barrier()
    monkeypatch.setattr(energy_of_rank, "Packages", partial(Packages, root))
    energy = energy_of_rank.EnergyOfRank()
    energy.joules()
    hvd.barrier()
    if hvd.rank() == 0:
        (zone / "energy_uj").write_text("2000000\n")
    hvd.barrier()
    counted = hvd.allgather_object(energy.joules())
    assert [one.get("joules_packages") for one in counted] == [pytest.approx(3.0), *[None] * (hvd.size() - 1)]
    assert energy.lacks == ""
