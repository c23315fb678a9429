"""A second user of the machine reads and ends nothing: of a cluster, starting or running, and of a ringrun job."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from attack.second_user import Exposed, Stranger
from harness.programs import RINGRUN, ran
from harness.waiting import LIMIT
from ring_notebook.notebook.cluster.cluster import Cluster

SECRET = "token-of-the-first-user"
SECONDS = 4.0
"""Length of the attack on what runs; the first try is made however slow the machine."""
JOB = """
import os, time
from ring_notebook.api.basics import init, rank
from ring_notebook.api.objects import broadcast_object
init()
print("ready", flush=True)
# All ranks stop in the same round.
while not broadcast_object(os.path.exists({stop!r})):
    time.sleep(0.01)
print("lived", rank(), flush=True)
"""


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRST_USERS_TOKEN", SECRET)


def attacked(intruder: Stranger, *folders: Path) -> dict[str, str]:
    """What the intruder gets of all that is open for `SECONDS`."""
    deadline = time.monotonic() + SECONDS
    got = intruder.attack(Exposed(*folders))
    while time.monotonic() < deadline:
        got |= intruder.attack(Exposed(*folders))
    return got


def test_the_attack_works_where_nothing_is_protected(intruder: Stranger, tmp_path: Path) -> None:
    """Otherwise the other tests would prove nothing."""
    program = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(flush=True); s.accept()[0].send(b'x')"
    )
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    for folder in (open_folder, tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    (open_folder / "file").write_text(SECRET)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        got = intruder.attack(Exposed(open_folder))
    assert SECRET in got.values()
    assert "x" in got.values()


@pytest.mark.slow
def test_a_cluster_that_starts(intruder: Stranger, records: Path) -> None:
    got: dict[str, str] = {}
    tries = 0

    def attack(started: threading.Event) -> None:
        nonlocal tries
        while not started.is_set():
            exposed = Exposed(records)
            got.update(intruder.attack(exposed))
            tries += bool(exposed.processes)  # not those before there is anything to attack

    while not tries:
        started = threading.Event()
        thread = threading.Thread(target=attack, args=(started,))
        thread.start()
        try:
            with Cluster(2) as cluster:
                started.set()
                assert [engine.run for engine in cluster.status()] == ["", ""]
        finally:
            started.set()
            thread.join()
    assert got == {}


@pytest.mark.parametrize("options", [[], ["--elastic"]], ids=["mpi", "elastic"])
def test_a_ringrun_job(options: list[str], intruder: Stranger, tmp_path: Path) -> None:
    """From its start on."""
    stop = tmp_path / "stop"
    command = [*RINGRUN, "--no-prefix", *options, "-np", "2", "python", "-c"]
    with subprocess.Popen([*command, JOB.format(stop=str(stop))], stdout=subprocess.PIPE, text=True) as job:
        got = attacked(intruder, tmp_path)
        stop.touch()
        said, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == 0
    assert sorted(line for line in said.splitlines() if "lived" in line) == ["lived 0", "lived 1"]
    assert got == {}


def scanned() -> list[str]:
    """Addresses and ports at which processes of ours listen, according to ``ss``."""
    listed = ran(["ss", "-Hltnp"], check=True).stdout
    ours = {str(pid) for pid in Exposed().processes}
    return [line.split()[3] for line in listed.splitlines() if ours.intersection(re.findall(r"pid=(\d+)", line))]


@pytest.mark.slow
def test_a_cluster_that_runs(intruder: Stranger, shared_records: Path, cluster: Cluster) -> None:
    cluster.run("kept = 42").wait()
    run = cluster.run(
        f"import time, ring_notebook.torch as ring\n"
        f"while True:\n    print({SECRET!r}); ring.log(loss=1.0); time.sleep(0.02)"
    )
    got = attacked(intruder, shared_records)
    assert not run.done
    run.stop()
    assert cluster.pull("kept") == 42
    assert got == {}


def test_what_listens(cluster: Cluster) -> None:
    """Loopback alone, also when the ranks use MPI."""
    if shutil.which("ss") is None:
        pytest.skip("NOT TESTED with a port scanner: `make test-deps` installs iproute2")
    cluster.run("from mpi4py import MPI; assert MPI.COMM_WORLD.allreduce(1) == 2").wait()
    found = scanned()
    assert len(found) > 10
    assert [address for address in found if not address.startswith("127.0.0.1:")] == []


def test_the_controller_lets_nobody_in(intruder: Stranger, shared_records: Path, cluster: Cluster) -> None:
    """What ranks print and log passes through its ports, which the port scanner of the tests above also finds."""
    run = cluster.run(f"import time\nwhile True: print({SECRET!r}); time.sleep(0.02)")
    controller = Exposed(shared_records, only=[cluster._processes.pids["controller"]])
    assert len(controller.listeners) > 10
    for _ in range(3):
        assert intruder.attack(controller) == {}
    assert not run.done
    run.stop()


def test_no_key_is_on_a_command_line(cluster: Cluster) -> None:
    """Everybody may read these."""
    (file,) = cluster.directory.glob("security/*-client.json")
    about = json.loads(file.read_text())
    lines = "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in Exposed().processes)
    assert "ring_notebook" in lines
    assert about["curve_serverkey"] not in lines
    assert about["key"] not in lines
