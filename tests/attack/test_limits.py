"""Few descriptors, bursts of signals and hostile names: an end that says why, or none at all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.programs import ran
from harness.waiting import LIMIT, SLEEPS, until
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.run.catalogue import listing

CLUSTER = """
import sys
from ring_notebook.errors import ClusterError
from ring_notebook.notebook.cluster.cluster import Cluster
try:
    with Cluster(2) as cluster:
        cluster.run("x = 1").wait()
    print("ran")
except ClusterError as error:
    print(error)
"""
pytestmark = pytest.mark.usefixtures("without_torch")
RANK = "from ring_notebook.api.basics import init, rank; init(); print('rank', rank())"
RINGRUN = [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix", "-np", "2"]
HOSTILE_NAMES = ["../../../x", "<script>alert(1)</script>", "\x1b[31m\x1b]0;t\x07", "a\nb\0c", "é" * 3000, "{x} $x %s"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(64, 64, "needs 160 file descriptors"), (160, 160, "ran\n"), (64, 300, "ran\n"), (64, 1024, "ran\n")],
)
def test_a_cluster_with_few_descriptors(soft: int, hard: int, expected: str, records: Path) -> None:
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n{CLUSTER}"
    done = ran([sys.executable, "-c", limited])
    assert done.returncode == 0
    assert expected in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("start", ["job", "cluster"])
@pytest.mark.parametrize(
    ("kib", "expected"), [(0, "may write files of 0 KiB"), (100_000, "files may be at most 0.0954 GiB")]
)
def test_a_limit_on_the_size_of_files(kib: int, expected: str, start: str, records: Path) -> None:
    """It holds for memory that processes share, too: one line says which limit that is."""
    job = f"import os, sys\nos.execv(sys.executable, {[*RINGRUN, 'python', '-c', RANK]})"
    done = with_file_limit(kib, CLUSTER if start == "cluster" else job)
    said = done.stdout + done.stderr
    assert expected in said
    assert "ulimit -f" in said
    assert "temporary" not in said


@pytest.mark.slow
def test_ring_memory_fits_into_the_largest_file() -> None:
    done = with_file_limit(2_000_000, f"import os, sys\nos.execv(sys.executable, {[*RINGRUN, 'python', '-c', RANK]})")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["rank 0", "rank 1"]), done.stderr


def with_file_limit(kib: int, program: str) -> subprocess.CompletedProcess[str]:
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({kib} << 10, {kib} << 10))\n{program}"
    return ran([sys.executable, "-c", limited])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_burst_of_signals_to_a_job(number: signal.Signals) -> None:
    """From its very first moment: it ends soon, and the fixture finds nothing left."""
    for delay in (0.0, 0.3, 3.0):
        with subprocess.Popen(
            [*RINGRUN, "python", "-c", f"{RANK}\n{SLEEPS}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as job:
            time.sleep(delay)
            for _ in range(50):
                os.kill(job.pid, number)
                time.sleep(0.002)
            _, said = job.communicate(timeout=LIMIT)
        assert job.returncode != 0
        # Python itself says so when a signal arrives before it has begun with a program.
        assert re.findall(r"Fatal Python error: (?!init_)", said) == [], said


@pytest.mark.slow
def test_a_burst_of_interrupts_to_a_run(cluster: Cluster) -> None:
    cluster.run("kept = 42").wait()
    run = cluster.run("import time\nfor _ in range(6000): time.sleep(0.01)")
    until(lambda: [status.line for status in run.log.statuses().values()] == [2, 2])
    for _ in range(50):
        run.stop()
    assert run.wait_idle(LIMIT)
    assert cluster.pull("kept") == 42
    cluster.run("after = kept + 1").wait()
    assert cluster.pull("after", rank=1) == 43


def test_hostile_names_of_runs_and_metrics(shared_records: Path, cluster: Cluster) -> None:
    """They are written as they are, and lead nowhere else."""
    for name in HOSTILE_NAMES:
        run = cluster.run(f"ring.log(**{{{name!r}: 1.0}})", name=name)
        run.wait()
        assert run.log.directory.parent == shared_records / "runs"
        assert name in run.log.view().names
    assert "<script>" not in listing()._repr_html_()
    assert {path.name for path in shared_records.iterdir()} <= {"runs"}


def test_a_caller_for_whom_no_thread_starts_learns_of_it(tmp_path: Path) -> None:
    """As a rank of run() under a limit on processes; it and those that come later do not wait for ever."""
    code = """
import resource, sys, threading
from pathlib import Path
from ring_notebook.rank.known_callers import KnownCallers, call
callers = KnownCallers(sys.argv[1], b"", lambda caller: caller.send(1))
unlimited = resource.getrlimit(resource.RLIMIT_AS)
threading.stack_size(1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (4096 * int(Path("/proc/self/statm").read_text().split()[0]), unlimited[1]))
with call(sys.argv[1], b"") as caller:
    try:
        print(caller.recv())
    except EOFError:
        print("refused")
resource.setrlimit(resource.RLIMIT_AS, unlimited)
with call(sys.argv[1], b"") as caller:
    print(caller.recv())
callers.close()
"""
    done = ran([sys.executable, "-c", code, str(tmp_path / "callers")], timeout=LIMIT)
    assert (done.stdout, done.stderr) == ("refused\n1\n", "")
