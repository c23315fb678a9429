"""Debuggers that attach to what runs a job: ranks, engines and the supervisor, stopped, continued and killed there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attack.debugger import Debugger
from harness.waiting import LIMIT, until
from ring_notebook.notebook.cluster.cluster import Cluster

SUMS = """
import ctypes, os, sys, time
from pathlib import Path
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no debugger of this user may attach, nor read its descriptors
from ring_notebook.api.basics import init, rank
from ring_notebook.api.objects import allreduce_numbers
from ring_notebook.core.communicator import ReduceOp
folder = Path(sys.argv[1])
init()
(folder / f"rank-{rank()}").write_text(str(os.getpid()))
ended = 0
while not ended:
    ended, two = allreduce_numbers([(folder / "end").exists(), 1], ReduceOp.SUM, "numbers")
    assert two == 2
    time.sleep(0.001)
os.write(1, f"rank {rank()} is well\\n".encode())
"""


class Job:
    """Two ranks of ``ringrun`` that add numbers until `end`."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self._folder = folder
        command = ["-m", "ring_notebook.launch.cli", "--no-prefix", "-np", "2", "python", "-c", SUMS, str(folder)]
        with (folder / "output").open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command], env=os.environ | settings, stdout=output, stderr=subprocess.STDOUT
            )
        files = [folder / f"rank-{rank}" for rank in range(2)]
        self.wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        self.ranks = [int(file.read_text()) for file in files]
        (supervisor,) = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in self.ranks}
        self.supervisor = supervisor

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return (self._folder / "output").read_text()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition, which must come while the job runs."""
        until(lambda: holds() or self.process.poll() is not None, LIMIT, lambda: self.output)
        assert self.process.poll() is None or holds(), self.output

    def end(self) -> None:
        """Have the ranks end; they must end well."""
        (self._folder / "end").touch()
        assert self.process.wait(LIMIT) == 0, self.output
        assert all(f"rank {rank} is well" in self.output for rank in range(2))


@pytest.mark.slow
def test_a_debugger_that_attaches_stops_and_lets_go(tmp_path: Path) -> None:
    """To ranks and supervisor, as gdb and as strace do: the job waits meanwhile, and its sums are right."""
    job = Job(tmp_path)
    for turn in range(10):
        for pid in (*job.ranks, job.supervisor):
            with Debugger(pid, seizes=bool(turn % 2)) as debugger:
                if turn % 2:
                    debugger.continue_()
                    debugger.stop()
    job.end()


def test_a_rank_that_a_debugger_has_stopped_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path, RING_STALL_WARNING="0.5")
    words = f"rank 1 has not called it; a signal or a debugger has stopped rank 1 (process {job.ranks[1]})"
    with Debugger(job.ranks[1]):
        job.wait_until(lambda: words in job.output)
    job.end()


@pytest.mark.parametrize("takes_note", [True, False])
def test_a_rank_is_killed_under_a_debugger(takes_note: bool, tmp_path: Path) -> None:
    """Linux tells its debugger first; the supervisor does not wait for that."""
    job = Job(tmp_path)
    debugger = Debugger(job.ranks[1])
    if takes_note:
        debugger.kill()
    else:
        os.kill(job.ranks[1], signal.SIGKILL)
    try:
        assert job.process.wait(LIMIT) == 128 + signal.SIGKILL, job.output
    finally:
        if not takes_note:
            os.waitpid(job.ranks[1], 0x40000000)
    assert "failed first: killed by SIGKILL" in job.output


@pytest.mark.slow
def test_the_supervisor_is_killed_under_a_debugger(tmp_path: Path) -> None:
    job = Job(tmp_path)
    Debugger(job.supervisor).kill()
    assert job.process.wait(LIMIT) != 0
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in job.ranks), why=lambda: "ranks live on alone")


@pytest.mark.slow
def test_an_engine_that_a_debugger_has_stopped_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Cluster(2) as cluster:
        cluster.run("ring.barrier()").wait()
        with Debugger(cluster.status()[1].pid):
            assert "a signal or a debugger has stopped it" in cluster.stacks()[1].trouble
        cluster.run("ring.barrier()")
