"""Start, stop, death: whatever ends a notebook or its cluster, no process stays, and the notebook says what died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import indent

import psutil
import pytest

from harness.waiting import until
from ring_notebook.errors import ClusterError, MPIMissingError
from ring_notebook.launch.supervisor.forked_rank import ADDRESS
from ring_notebook.notebook.cluster import engine_forks
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.engines import Engines

# A kernel as far as the cluster is concerned: it starts one, tells its processes, and lives on.
KERNEL = """
import json, sys, time, psutil
from ring_notebook.notebook.cluster.cluster import Cluster
cluster = Cluster(2).start()
if sys.argv[1] == "busy":
    cluster.run("while True: pass")
    time.sleep(0.5)
print(json.dumps([child.pid for child in psutil.Process().children(recursive=True)]), flush=True)
time.sleep(600)
"""
pytestmark = pytest.mark.usefixtures("without_torch")


@pytest.fixture(scope="module", autouse=True)
def _own_fork_server() -> Iterator[None]:
    """Each cluster of this file has a process of its own that forks its engines, as a user's has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ADDRESS)
        yield


def alive(pids: list[int]) -> list[str]:
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{pid} {' '.join(process.cmdline())}")
        except psutil.NoSuchProcess:
            continue
    return found


def assert_gone(pids: list[int]) -> None:
    until(lambda: not alive(pids), why=lambda: alive(pids))


@pytest.fixture
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    process = subprocess.Popen(
        [sys.executable, "-c", KERNEL, request.param], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    pids = json.loads(process.stdout.readline())
    assert len(alive(pids)) >= 5
    yield process, pids
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("kernel", [pytest.param("idle", marks=pytest.mark.slow), "busy"], indirect=True)
def test_nothing_outlives_a_killed_kernel(kernel: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, pids = kernel
    process.kill()
    process.wait()
    assert_gone(pids)


@pytest.mark.slow  # `make test` runs test_nothing_outlives_a_killed_kernel
@pytest.mark.parametrize(("kernel", "lives"), [("idle", True), ("busy", True), ("busy", False)], indirect=["kernel"])
def test_nothing_outlives_a_killed_controller(kernel: tuple[subprocess.Popen[str], list[int]], lives: bool) -> None:
    """Nor one that is killed with the kernel, as where memory runs out."""
    process, pids = kernel
    controller = next(
        pid for pid in pids if "ring_notebook.notebook.cluster.controller" in " ".join(psutil.Process(pid).cmdline())
    )
    if not lives:
        process.send_signal(signal.SIGSTOP)  # it does not see the controller die
    os.kill(controller, signal.SIGKILL)
    if not lives:
        process.kill()
        process.wait()
    assert_gone(pids)
    assert (process.poll() is None) == lives


@pytest.fixture
def new_processes() -> Callable[[], list[int]]:
    """Those that this process has started since the test began, and theirs."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    return lambda: [child.pid for child in psutil.Process().children(recursive=True) if child.pid not in before]


@pytest.mark.slow
def test_engines_are_forks_of_one_process(new_processes: Callable[[], list[int]]) -> None:
    """Also those that `heal` starts. Where that process is killed, all engines are, and the next start has another."""
    with Cluster(2) as cluster:
        pids = new_processes()
        engines = [psutil.Process(engine.pid) for engine in cluster.status()]
        server = engines[0].parent()
        assert server is not None
        assert [engine.parent() for engine in engines] == [server, server]
        assert "fork_server" in " ".join(server.cmdline())
        engines[1].kill()
        until(lambda: 1 not in cluster.living)
        cluster.heal()
        assert psutil.Process(cluster.status()[1].pid).parent() == server
        server.kill()
        until(lambda: not cluster.running)
        assert_gone(pids)
        cluster.start()
        assert cluster.run("print(ring.rank())").wait().status == "ok"


@pytest.mark.slow
def test_that_process_is_there_before_a_cluster_and_after_a_restart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, new_processes: Callable[[], list[int]]
) -> None:
    """Unless what it was started with has changed; it ends with the cluster."""

    def parent(cluster: Cluster) -> int:
        (found,) = {psutil.Process(engine.pid).ppid() for engine in cluster.status()}
        return found

    engine_forks.begin_ahead()
    until(lambda: any("fork_server" in line for line in alive(new_processes())))
    begun = next(int(line.split()[0]) for line in alive(new_processes()) if "fork_server" in line)
    with Cluster(2) as cluster:
        assert parent(cluster) == begun
        before = cluster.status()
        cluster.restart()
        assert parent(cluster) == begun
        assert not {engine.pid for engine in cluster.status()} & {engine.pid for engine in before}
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        cluster.restart()
        assert parent(cluster) != begun
        assert_gone([begun])
    assert_gone(new_processes())


@pytest.mark.slow
def test_engines_start_where_that_process_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    raises = "import os, sys\nif 'RING_FORK_SERVER_ROOM' in os.environ:\n    sys.exit('on purpose')\n"
    (tmp_path / "sitecustomize.py").write_text(raises)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with Cluster(2) as cluster:
        parents = [psutil.Process(engine.pid).parent() for engine in cluster.status()]
        assert parents[0] == parents[1]
        assert "fork_server" not in " ".join(parents[0].cmdline() if parents[0] else [])


def test_start_stop_and_start_again(new_processes: Callable[[], list[int]]) -> None:
    cluster = Cluster(2).start()
    pids = new_processes()
    with pytest.raises(ClusterError, match="already running"):
        cluster.start()
    assert [engine.rank for engine in cluster.status()] == [0, 1]
    cluster.stop()
    assert_gone(pids)
    assert not cluster.running
    with pytest.raises(ClusterError, match="%ring start"):
        cluster.run("pass")
    cluster.stop()
    assert cluster.serves(2)
    assert not any((cluster.serves(3), cluster.serves(keep=True), cluster.serves(hosts="a:2")))
    with cluster:
        assert cluster.run("pass").wait().status == "ok"


def test_without_an_mpiexec(settings: Callable[..., None], new_processes: Callable[[], list[int]]) -> None:
    settings(mpiexec="/no/such/mpiexec")
    with pytest.raises(MPIMissingError, match="/no/such/mpiexec"):
        Cluster(2).start()
    assert alive(new_processes()) == []


HANGS = """
import os, pathlib, sys, time
print("waiting for libfabric", file=sys.stderr, flush=True)
pathlib.Path(__file__).with_name(f"came {os.getpid()}").touch()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("import sys; sys.exit('libfabric.so.1: cannot open')", r"rank \d on .* exited with code 1"),
        (HANGS, "0 of 2 engines registered within 2 s, not ranks 0-1"),
    ],
    ids=["raises", "hangs"],
)
def test_an_engine_that_does_not_start_says_why(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    new_processes: Callable[[], list[int]],
    broken: str,
    message: str,
) -> None:
    wait = Engines.wait_for

    def wait_from_there(engines: Engines, ranks: Sequence[int], *_: object) -> None:
        """The limit counts from when they hang, however busy the machine is."""
        until(lambda: len([*tmp_path.glob("came *")]) == 2)
        wait(engines, ranks, 2.0)

    monkeypatch.setenv(ADDRESS, "@nobody")  # forks do not import it
    engines_alone = "import os\nif 'RING_RANK' in os.environ:\n" + indent(broken, "    ")
    (tmp_path / "sitecustomize.py").write_text(engines_alone + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    if broken is HANGS:
        monkeypatch.setattr(Engines, "wait_for", wait_from_there)
    with pytest.raises(ClusterError, match=message) as caught:
        Cluster(2).start()
    shown = str(caught.value)
    assert "libfabric" in shown
    assert "BAD TERMINATION" not in shown
    assert shown.endswith("`%ring doctor` checks everything that engines need; `%ring start` tries again.")
    assert_gone(new_processes())


@pytest.mark.slow
def test_without_the_native_core(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, new_processes: Callable[[], list[int]]
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ring_notebook._core'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ClusterError, match=r"CoreMissingError: .*pip install"):
        Cluster(2).start()
    assert_gone(new_processes())


@pytest.mark.slow
def test_more_ranks_than_engines(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="expected 1 to 2 ranks, got 9"):
        cluster.run("pass", n=9)


def test_variables_go_there_and_back(cluster: Cluster) -> None:
    cluster.push({"table": {"a": [1, 2]}, "function": lambda x: x + 1})
    cluster.run("from ring_notebook.core import world\nmine = function(world.current().rank)\ntable['b'] = mine").wait()
    assert cluster.pull("table", rank=1) == {"a": [1, 2], "b": 2}
    assert cluster.variables("mine") == [{"mine": "int 1"}, {"mine": "int 2"}]


def test_what_is_pushed_is_pickled_once(cluster: Cluster) -> None:
    class Large:
        pickled = 0

        def __reduce__(self) -> tuple[type[int], tuple[int]]:
            type(self).pickled += 1
            return int, (7,)

    cluster.push({"large": Large()})
    assert cluster.pull("large") == 7
    assert Large.pickled == 1


@pytest.mark.slow
def test_engines_are_lost_before_the_launcher_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several hosts the controller may learn of it first."""
    monkeypatch.setattr("ring_notebook.analysis.time_limits.REPORTING", 0.1)
    with Cluster(2) as cluster:
        engines = cluster._engines
        assert engines is not None
        trouble, deaths, told = engines.trouble, engines.deaths, threading.Event()
        engines.trouble = lambda: trouble() if told.is_set() else ""
        engines.deaths = lambda: deaths() if told.is_set() else {}
        run = cluster.run("import os\nos.kill(os.getpid(), 9)")
        until(lambda: bool(deaths()))
        for number in (0, 1):
            engines._client._unregister_engine({"content": {"id": number}})
        time.sleep(1.0)
        assert not run.done
        told.set()
        with pytest.raises(ClusterError, match="killed by SIGKILL"):
            run.wait()


def test_engines_that_were_not_announced_are_asked_for(cluster: Cluster) -> None:
    engines = cluster._engines
    assert engines is not None
    # As if they had registered just when the client subscribed to the news of that.
    engines._client._ids.clear()
    engines._client._engines.clear()
    engines.wait_for(range(2), timeout=60)
    assert cluster.run("pass").wait().status == "ok"


@pytest.mark.slow
def test_no_answer_is_overlooked(cluster: Cluster) -> None:
    cluster.run("x = 1").wait()
    for _ in range(3000):  # one in some hundred was, when requests were sent past the stream that receives
        assert cluster.variables("x") == [{"x": "int 1"}] * 2


def test_a_class_of_a_cell_comes_back_with_its_value(cluster: Cluster) -> None:
    cluster.run("class Point:\n    def __init__(self, x): self.x = x\npoint = Point(3)").wait()
    assert cluster.pull("point").x == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing_name", "no variable 'missing_name'"), ("lock", "'lock' .* cannot be pickled")],
)
def test_what_cannot_be_pulled_says_why(cluster: Cluster, name: str, message: str) -> None:
    cluster.run("import threading\nlock = threading.Lock()").wait()
    with pytest.raises(ClusterError, match=message):
        cluster.pull(name)


def test_what_cannot_be_pushed_says_why(cluster: Cluster) -> None:
    import threading

    with pytest.raises(ClusterError, match=r"lock \(lock\) cannot be pickled"):
        cluster.push({"lock": threading.Lock()})


def test_one_run_at_a_time(cluster: Cluster) -> None:
    run = cluster.run("import time; time.sleep(60)", name="long")
    with pytest.raises(ClusterError, match="run long is in progress"):
        cluster.run("pass")
    with pytest.raises(ClusterError, match="run long is in progress"):
        cluster.pull("x")
    run.stop()
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    assert cluster.run("pass").wait().status == "ok"
