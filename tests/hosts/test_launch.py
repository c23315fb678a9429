"""ringrun and run() over two hosts: the launcher's flags, and results that come back over the link."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.programs import RINGRUN
from harness.two_hosts import ALLOCATION, NAMES, TwoHosts

HOSTS = ",".join(f"{name}:2" for name in NAMES)
WHERE = "import os, socket; rank = int(os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK'])"
PLACES = ["0 ring-a", "1 ring-a", "2 ring-b", "3 ring-b"]


@pytest.mark.parametrize("own", [True, False], ids=["supervisor", "mpiexec"])
def test_ringrun_fills_the_hosts_in_order(hosts: TwoHosts, own: bool) -> None:
    program = f"{WHERE}; os.write(1, f'{{rank}} {{socket.gethostname()}}\\n'.encode())"
    ringrun = [*RINGRUN, "--no-prefix", "--verbose", "-np", "4", "-H", HOSTS]
    flags = [] if own else ["--mpi-args", " ".join(hosts.launcher_flags)]
    command, *lines = hosts.on_first([*ringrun, *flags, "python", "-c", program]).splitlines()
    assert sorted(lines) == PLACES
    assert ("ring_notebook.launch.supervise" in command) == own


@pytest.mark.slow  # `make test` runs test_run_brings_the_results_back
def test_ringrun_takes_the_allocation(hosts: TwoHosts) -> None:
    program = f"{WHERE}; os.write(1, f'{{rank}} {{socket.gethostname()}}\\n'.encode())"
    ringrun = [*RINGRUN, "--no-prefix", "--verbose", "python", "-c", program]
    lines = hosts.on_first(ringrun, environment=ALLOCATION).splitlines()
    assert sorted(line for line in lines if " ring-" in line and line[0].isdigit()) == PLACES
    assert "ringrun: Slurm job 17: 4 slots on ring-a, ring-b" in lines


@pytest.mark.slow
@pytest.mark.parametrize("named", [f"hosts={HOSTS!r}", ""], ids=["named", "allocated"])
def test_run_brings_the_results_back(hosts: TwoHosts, named: str) -> None:
    program = f"""
from ring_notebook import run
def place():
    {WHERE}
    return f"{{rank}} {{socket.gethostname()}}"
print(run(place, {named}))
"""
    assert hosts.on_first([sys.executable, "-c", program], environment=ALLOCATION).strip() == str(PLACES)


def test_lines_and_causes_of_all_hosts(hosts: TwoHosts, tmp_path: Path) -> None:
    """What a rank elsewhere prints has its number, its traceback is read, and its files are on the launching host."""
    (tmp_path / "train.py").write_text(
        f"{WHERE}\nimport time\nos.write(1, b'x' * 9000 + b'\\n')\ntime.sleep(1)\n"
        "if rank == 3: raise ValueError('bad')\n"
        "time.sleep(30)"
    )
    ringrun = [*RINGRUN, "--output-dir", str(tmp_path / "out"), "-np", "4"]
    said = hosts.on_first(["sh", "-c", '"$@"; true', "sh", *ringrun, "-H", HOSTS, str(tmp_path / "train.py")])
    lines = said.splitlines()
    assert sorted(line for line in lines if line.endswith("xxx")) == [f"[{rank}] {'x' * 9000}" for rank in range(4)]
    [last] = [line for line in lines if "failed first" in line]
    assert last.endswith(f"rank 3 on ring-b failed first: exit code 1, ValueError: bad at {tmp_path}/train.py:5")
    assert (tmp_path / "out/rank.3/stdout").read_text() == "x" * 9000 + "\n"
