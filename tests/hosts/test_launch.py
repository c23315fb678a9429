"""ringrun and run() over two hosts: the launcher's flags, and results that come back over the link."""

from __future__ import annotations

import sys

from harness.two_hosts import NAMES, TwoHosts

HOSTS = ",".join(f"{name}:2" for name in NAMES)
WHERE = "import os, socket; rank = int(os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK'])"
PLACES = ["0 ring-a", "1 ring-a", "2 ring-b", "3 ring-b"]


def test_ringrun_fills_the_hosts_in_order(hosts: TwoHosts) -> None:
    program = f"{WHERE}; os.write(1, f'{{rank}} {{socket.gethostname()}}\\n'.encode())"
    ringrun = [sys.executable, "-m", "ring_notebook.launch.cli", "-np", "4", "-H", HOSTS]
    said = hosts.on_first([*ringrun, "--mpi-args", " ".join(hosts.launcher_flags), "python", "-c", program])
    assert sorted(said.splitlines()) == PLACES


def test_run_brings_the_results_back(hosts: TwoHosts) -> None:
    program = f"""
from ring_notebook import run
def place():
    {WHERE}
    return f"{{rank}} {{socket.gethostname()}}"
print(run(place, hosts="{HOSTS}", mpi_args={hosts.launcher_flags}))
"""
    assert hosts.on_first([sys.executable, "-c", program]).strip() == str(PLACES)


def test_a_rank_that_dies_elsewhere_is_named(hosts: TwoHosts) -> None:
    program = f"{WHERE}; import time; rank == 2 and os._exit(7); time.sleep(30)"
    ringrun = [sys.executable, "-m", "ring_notebook.launch.cli", "-np", "4", "-H", HOSTS]
    flags = ["--mpi-args", " ".join(hosts.launcher_flags)]
    said = hosts.on_first(["sh", "-c", '"$@"; echo "code $?"', "sh", *ringrun, *flags, "python", "-c", program])
    assert "ringrun: rank 2 on ring-b failed first: exit code 7" in said
    assert "code 7" in said
