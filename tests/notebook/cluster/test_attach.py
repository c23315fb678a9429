"""A cluster and the run in it are found again: from another notebook, and after the one that started it is gone."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from harness.waiting import until
from ring_notebook.errors import ClusterError
from ring_notebook.machine.process_life import began
from ring_notebook.notebook.cluster import cluster_folders
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.record.run_files import write_json

pytestmark = pytest.mark.usefixtures("without_torch")
# The notebook that starts the cluster and a run, in a process of its own.
FIRST = """
import atexit, sys, time
from ring_notebook.notebook.cluster import cluster_folders
from ring_notebook.notebook.cluster.cluster import Cluster
atexit.register(time.sleep, 0.5)  # a kernel has more to do when it exits, and its threads go on meanwhile
cluster = Cluster(2, keep=sys.argv[1] == "keep").start()
run = cluster.run('''
import pathlib, time
from ring_notebook.core import world
from ring_notebook.core import metrics
print("from the start")
kept = 5
for step in range(40):
    metrics.log(loss=1 / (step + 1))
    while step in (4, 38) and not pathlib.Path(f"to {step}").exists():
        time.sleep(0.05)
''', name="long")
while len(run.metrics) < 4:
    time.sleep(0.05)
print("running", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def first(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen[str]]:
    """The first notebook, whose run continues after step 4, and ends, when it may."""
    monkeypatch.chdir(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", FIRST, request.param], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "running"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def assert_complete(cluster: Cluster, since: float) -> None:
    """The run in the attached cluster is there from its start, and goes on to its end."""
    run = cluster.last_run
    assert run is not None
    lasted = time.monotonic() - since
    for step in (4, 38):
        Path(f"to {step}").touch()
    run.wait()
    assert run.status == "ok"
    assert run.log.name == "long"
    assert run.summary["seconds"] >= lasted  # from its start, not from when it was found
    rows = run.metrics
    assert {rank: [row.step for row in rows if row.rank == rank] for rank in (0, 1)} == {
        0: list(range(40)),
        1: list(range(40)),
    }
    assert [piece.text for piece in run.log.view().output] == ["from the start\n"] * 2


@pytest.mark.parametrize("first", ["bound"], indirect=True)
def test_from_another_notebook(first: subprocess.Popen[str]) -> None:
    begun = time.monotonic()
    with pytest.raises(ClusterError, match=f"notebooks that are open; `%ring attach ID`.*\\n  {only_id()}  2 engines"):
        Cluster.attach()
    cluster = Cluster.attach(only_id())
    left = cluster.last_run
    cluster.stop()
    assert left is not None
    with pytest.raises(ClusterError, match="the run continues"):
        left.wait()
    cluster = Cluster.attach(only_id())
    assert cluster.running
    run = cluster.last_run
    assert run is not None
    assert [engine.run for engine in cluster.status()] == [run.log.run] * 2
    # Where it waits for a file.
    until(lambda: {rank["line"] for rank in run.state()["ranks"]} <= {9, 10})
    assert_complete(cluster, begun)
    assert cluster.pull("kept") == 5
    cluster.stop()
    assert first.poll() is None
    with pytest.raises(ClusterError, match="%ring start"):
        cluster.run("pass")


@pytest.mark.slow
@pytest.mark.parametrize("first", ["keep"], indirect=True)
@pytest.mark.parametrize("how", ["killed", "in order"])
def test_after_the_notebook_is_gone(first: subprocess.Popen[str], how: str) -> None:
    begun = time.monotonic()
    if how == "killed":
        first.kill()
    else:
        assert first.stdin is not None
        first.stdin.close()  # and it exits as a kernel does that is restarted
    first.wait()
    Path("to 4").touch()
    time.sleep(1)  # records that nobody takes in
    cluster = Cluster.attach()
    assert_complete(cluster, begun)
    assert cluster.last_run is not None
    assert cluster.last_run.summary["status"] == "ok"
    assert cluster.run("assert kept == 5").wait().status == "ok"
    cluster.stop()
    assert_nothing_to_attach_to()


@pytest.mark.slow
@pytest.mark.parametrize("first", ["keep"], indirect=True)
def test_a_run_of_another_notebook_can_be_stopped(first: subprocess.Popen[str]) -> None:
    cluster = Cluster.attach(only_id())
    assert cluster.last_run is not None
    cluster.last_run.stop()
    with pytest.raises(KeyboardInterrupt):
        cluster.last_run.wait()
    first.kill()
    first.wait()
    again = Cluster.attach()
    again.stop()
    cluster.stop()


def assert_nothing_to_attach_to() -> None:
    with pytest.raises(ClusterError, match="no cluster of this folder is running"):
        Cluster.attach()


def only_id() -> str:
    """That of the cluster of the first notebook, which is open."""
    (directory,) = cluster_folders.running()
    return directory.name.split("-")[1]


def held() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return threading.active_count(), psutil.Process().num_fds()


@pytest.mark.slow
@pytest.mark.parametrize("first", ["bound"], indirect=True)
def test_a_cluster_that_does_not_answer_costs_nothing(
    first: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = psutil.Process(cluster_folders.read(next(cluster_folders.running()))["controller"])
    before = (0, 0)
    for attempt in range(3):
        controller.suspend()
        try:
            with monkeypatch.context() as patch:
                patch.setattr("ring_notebook.notebook.cluster.cluster._ATTACH_TIMEOUT", 0.5)
                with pytest.raises(ClusterError, match="no cluster of this folder is running"):
                    Cluster.attach(only_id())
        finally:
            controller.resume()
        if not attempt:
            time.sleep(2)  # until what is about to end has ended; the rest is made once and kept
            before = held()
    Cluster.attach(only_id()).stop()
    until(lambda: all(now <= was for now, was in zip(held(), before, strict=True)), why=lambda: (held(), before))


def test_nothing_to_attach_to() -> None:
    assert_nothing_to_attach_to()
    with pytest.raises(ClusterError, match=r"^no running cluster is named a\.ipynb$"):
        Cluster.attach("a.ipynb")


class Notebooks:
    """Clusters of other notebooks of this folder, as their kernels describe them."""

    def __init__(self) -> None:
        self._open = subprocess.Popen(["sleep", "1000"])
        self.ended = subprocess.Popen(["true"])
        self.ended.wait()

    def add(self, notebook: str, *, is_open: bool = False, keep: bool = True) -> str:
        """Returns the cluster's id."""
        directory = cluster_folders.new_directory()
        cluster_folders.write(
            directory,
            {
                "n": 2,
                "why": "",
                "keep": keep,
                "met": True,
                "formation": 0,
                "controller": self._open.pid,
                "launcher": self._open.pid,
                "engines": [],
            },
        )
        kernel = self._open.pid if is_open else self.ended.pid
        about = {**cluster_folders.read(directory), "notebook": notebook, "kernel": kernel, "began": began(kernel)}
        write_json(directory / "cluster.json", about)
        return directory.name.split("-")[1]

    def close(self) -> None:
        self._open.kill()
        self._open.wait()


@pytest.fixture
def notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Callable[..., None]) -> Iterator[Notebooks]:
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/ada/mine.ipynb")
    settings(runs_dir=tmp_path / "runs")
    notebooks = Notebooks()
    yield notebooks
    notebooks.close()


def ids(which: str = "") -> list[str]:
    return [directory.name.split("-")[1] for directory in cluster_folders.to_attach_to(which)]


def test_the_clusters_of_this_notebook_come_first(notebooks: Notebooks) -> None:
    mine = notebooks.add("/home/ada/mine.ipynb")
    notebooks.add("/home/ada/other.ipynb")
    notebooks.add("/home/ada/open.ipynb", is_open=True)
    assert ids() == [mine]


def test_one_that_has_a_kernel_is_not_offered(notebooks: Notebooks) -> None:
    notebooks.add("/home/ada/mine.ipynb", is_open=True)
    assert cluster_folders.left_behind() == {}
    kept = notebooks.add("/home/ada/mine.ipynb")
    assert cluster_folders.left_behind()["id"] == kept


def test_of_others_only_one_that_is_kept_is_taken_unasked(notebooks: Notebooks) -> None:
    is_open = notebooks.add("/home/ada/open.ipynb", is_open=True)
    with pytest.raises(ClusterError, match=f"(?s)notebooks that are open.*{is_open}  2 engines.*/home/ada/open.ipynb"):
        ids()
    kept = notebooks.add("/home/ada/other.ipynb")
    notebooks.add("/home/ada/ending.ipynb", keep=False)
    assert ids() == [kept]
    second = notebooks.add("/home/ada/other.ipynb")
    with pytest.raises(ClusterError, match="several notebooks have kept a cluster; `%ring attach ID`") as caught:
        ids()
    assert all(text in str(caught.value) for text in (kept, second, f"{is_open}  2 engines"))


def test_any_cluster_can_be_named(notebooks: Notebooks) -> None:
    notebooks.add("/home/ada/mine.ipynb")
    kept, is_open = notebooks.add("/home/ada/other.ipynb"), notebooks.add("/home/ada/open.ipynb", is_open=True)
    assert ids(kept[:7]) == ids("other.ipynb") == ids("/home/ada/other.ipynb") == [kept]
    assert ids("open.ipynb") == [is_open]
    with pytest.raises(ClusterError, match="no running cluster is named absent"):
        ids("absent")
    notebooks.add("/home/ada/other.ipynb")
    with pytest.raises(ClusterError, match=r"several running clusters are named other\.ipynb"):
        ids("other.ipynb")
