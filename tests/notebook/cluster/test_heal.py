"""Ranks that die: the others keep their variables, and a heal starts the dead ones again, whatever befalls it."""

from __future__ import annotations

import _thread
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.waiting import until
from notebook.endurance.endure import TRAINS
from ring_notebook.errors import ClusterError, CollectiveAborted, MPIMissingError
from ring_notebook.launch.supervisor.engine_supervisor import Request
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.cluster.heal import prepare_engines
from ring_notebook.notebook.cluster.processes import Processes
from ring_notebook.notebook.engines import Engine, Engines
from ring_notebook.notebook.run.run import Run
from ring_notebook.protocol.registration import FORMATION

PRELUDE = "import faulthandler, os, signal, sys, time, torch\n"
SUM = "import torch\ntotal = float(ring.allreduce(torch.ones(1), op=ring.Sum))\n"


@pytest.fixture(scope="module")
def cluster(_own_records: Path) -> Iterator[Cluster]:
    """Three engines for all tests of this module."""
    with Cluster(3) as started:
        yield started


@pytest.fixture(autouse=True)
def _alive(cluster: Cluster) -> None:
    """All ranks live, and have a variable by which they are known."""
    if not cluster.running:
        cluster.restart()
    cluster.heal()
    cluster.run(f"{PRELUDE}name = ring.rank()").wait()


def kill(cluster: Cluster, *ranks: int) -> None:
    """Kill idle ranks, and return when the notebook knows of it."""
    for engine in cluster.status():
        if engine.rank in ranks:
            os.kill(engine.pid, signal.SIGKILL)
    until(lambda: not set(ranks) & set(cluster.living))


def ended(run: Run) -> Run:
    """The run, which has to end."""
    until(lambda: run.done)
    return run


def names(cluster: Cluster) -> list[object]:
    """The variable of each rank, None where it is lost."""
    return [kinds.get("name") for kinds in cluster.variables("name")]


def assert_whole(cluster: Cluster, cell: str = "") -> None:
    """A cell runs on all ranks, and a sum counts every one of them."""
    run = ended(cluster.run(f"{cell}{SUM}"))
    assert run.status == "ok", run.error
    assert [cluster.pull("total", rank) for rank in range(cluster.n)] == [cluster.n] * cluster.n


def test_a_cell_that_misses_names_of_before_says_that_its_rank_was_replaced(cluster: Cluster) -> None:
    if cluster._formation > 1:  # its other ranks must be none that a test before has replaced
        cluster.restart()
    ended(cluster.run("import json as kept_by_survivors"))
    kill(cluster, 1)
    assert cluster.heal() == [1]
    run = ended(cluster.run("if ring.rank() > 0: kept_by_survivors.dumps(1)\nring.barrier()"))
    shown = "\n".join(run.error._render_traceback_())  # type: ignore[union-attr]
    assert "NameError: name 'kept_by_survivors' is not defined" in shown
    assert "raised on rank 1" in shown
    replaced = r"rank 1 was replaced at \d\d:\d\d:\d\d: run the cells with your imports there again"
    assert len(re.findall(replaced, shown)) == 1
    assert re.search(replaced, run.summary["shown"])
    typo = ended(cluster.run("if ring.rank() == 1: kept_by_surviors"))
    assert "NameError" in typo.summary["shown"]
    assert "replaced" not in typo.summary["shown"], "no rank has it"
    assert ended(cluster.run("import json as kept_by_survivors\nkept_by_survivors.dumps(1)")).status == "ok"


@pytest.mark.slow
def test_mpi_raises_once_a_rank_has_died(cluster: Cluster) -> None:
    cluster.run("has_mpi = 'mpi4py.MPI' in sys.modules").wait()
    if not all(kinds["has_mpi"] == "bool True" for kinds in cluster.variables("has_mpi")):
        cluster.restart()
    keeps = (
        "from mpi4py import MPI\nworld = MPI.COMM_WORLD\nclass Trainer: comm = world\nassert world.allreduce(1) == 3"
    )
    assert ended(cluster.run(PRELUDE + keeps)).error is None
    kill(cluster, 2)
    for where in ([0, 1], None):
        for use in ("world.Barrier()", "MPI.COMM_WORLD.Get_size()", "from mpi4py import MPI"):
            run = ended(cluster.run(f"if ring.rank() == 0: {use}", ranks=where))
            assert isinstance(run.error, MPIMissingError), (use, run.error)
            assert "MPI has lost rank 2" in str(run.error)
            assert "%ring restart" in str(run.error)
        # In an object it is the null communicator.
        run = ended(cluster.run("if ring.rank() == 0: Trainer.comm.Barrier()", ranks=where))
        assert "Invalid communicator" in str(run.error)
        cluster.heal()
    run = ended(cluster.run("if ring.rank() == 2: from mpi4py import MPI"))
    assert isinstance(run.error, MPIMissingError)
    assert "was started again after a death" in str(run.error)


@pytest.mark.parametrize(
    ("rank", "code", "how"),
    [
        pytest.param(0, "os._exit(0)", "exited with code 0", marks=pytest.mark.slow),
        (1, "os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL, not out of memory"),
        (2, "faulthandler._sigsegv()", "was killed by SIGSEGV"),
    ],
)
def test_survivors_keep_their_variables(cluster: Cluster, rank: int, code: str, how: str) -> None:
    ended(cluster.run("import sys; print('of an earlier cell', file=sys.__stderr__, flush=True)"))
    dies = f"if ring.rank() == {rank}:\n    print('last words', file=sys.__stderr__, flush=True)\n    {code}\n"
    run = ended(cluster.run(f"{dies}ring.allreduce(torch.ones(1), name='sum')"))
    message = str(run.error)
    assert isinstance(run.error, ClusterError)
    assert message.startswith(f"rank {rank} on ")
    assert message.count(how) == message.count("last words") == message.count("%ring heal") == 1
    assert "of an earlier cell" not in message
    assert f"stopped because rank {rank} " in message
    assert "ipyparallel" not in message  # of the stack of a crash, the calls of the cell alone
    statuses = {one: run.log.ended()[one].status for one in range(3)}
    assert statuses == {one: "died" if one == rank else "aborted" for one in range(3)}
    assert "last words" not in run.summary["error"]  # the story is told once
    assert [one.state for one in cluster.status()] == ["died" if one == rank else "idle" for one in range(3)]
    # What is asked of the others runs; what needs all says what to do.
    living = [one for one in range(3) if one != rank]
    with pytest.raises(ClusterError, match=rf"^rank {rank} has died; `%ring heal` starts it again"):
        cluster.run("pass")
    assert ended(cluster.run(f"assert name == {living}[ring.rank()]\n{SUM}", ranks=living)).status == "ok"
    assert cluster.pull("total", living[0]) == 2
    pids = [one.pid for one in cluster.status()]
    assert cluster.heal() == [rank]
    assert [new == old for new, old in zip((one.pid for one in cluster.status()), pids, strict=True)] == [
        one != rank for one in range(3)
    ]
    assert names(cluster) == [None if one == rank else f"int {one}" for one in range(3)]
    assert_whole(cluster, TRAINS if rank == 1 else "")


@pytest.mark.slow
def test_a_rank_that_computes_is_stopped_when_another_dies(cluster: Cluster) -> None:
    run = ended(cluster.run("if ring.rank() == 1: os._exit(3)\nwhile True: pass"))
    assert "rank 1 on " in str(run.error)
    assert {rank: end.status for rank, end in run.log.ended().items()} == {
        0: "interrupted",
        1: "died",
        2: "interrupted",
    }


def test_two_ranks_die_and_come_back_one_by_one(cluster: Cluster) -> None:
    run = ended(cluster.run("if ring.rank() != 1: os._exit(7)\nring.barrier()"))
    until(lambda: cluster.living == [1])
    assert all(f"rank {rank} on " in str(run.error) for rank in (0, 2))
    with pytest.raises(ClusterError, match=r"ranks 0, 2 have died; .* starts them again"):
        cluster.run("pass")
    assert cluster.heal([2]) == [2]
    assert cluster.living == [1, 2]
    assert ended(cluster.run(SUM, ranks=[1, 2])).status == "ok"
    assert cluster.heal() == [0]
    assert cluster.heal() == []
    assert names(cluster) == [None, "int 1", None]
    assert_whole(cluster)


@pytest.mark.slow
def test_all_ranks_die(cluster: Cluster) -> None:
    run = ended(cluster.run("os._exit(7)"))
    assert "exited with code 7" in str(run.error)
    assert "%ring heal" not in str(run.error)
    until(lambda: not cluster.running)
    with pytest.raises(ClusterError, match=r"no other rank is left\. `%ring restart` brings the cluster back"):
        cluster.heal()
    cluster.restart()
    assert_whole(cluster)


def test_a_rank_that_nobody_waits_for_is_missed_by_the_next_cell(cluster: Cluster) -> None:
    kill(cluster, 1)
    with pytest.raises(ClusterError, match="rank 1 has died"):
        cluster.pull("name", 1)
    assert cluster.pull("name", 2) == 2
    assert cluster.variables("name") == [{"name": "int 0"}, {}, {"name": "int 2"}]
    with pytest.raises(ClusterError, match="rank 1 has died"):
        cluster.push({"x": 1})
    assert "has died" in cluster.stacks()[1].trouble


@pytest.mark.slow
def test_living_ranks_are_started_again_when_named(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="no rank 7"):
        cluster.heal([7])
    assert cluster.heal([0]) == [0]
    assert names(cluster) == [None, "int 1", "int 2"]
    assert_whole(cluster)


def test_a_rank_that_no_interrupt_stops_is_started_again(cluster: Cluster) -> None:
    stubborn = "while True:\n    try: time.sleep(600)\n    except KeyboardInterrupt: pass"
    run = ended(cluster.run(f"if ring.rank() == 2: os._exit(1)\n{stubborn}"))
    assert "ranks 0-1: still running" in str(run.error)
    with pytest.raises(ClusterError, match=r"has not stopped on ranks 0-1: .*`%ring heal -t 0,1,2`"):
        cluster.heal()
    assert cluster.heal([0, 1, 2]) == [0, 1, 2]
    assert_whole(cluster)


STUBBORN = """import time
if ring.rank() == 1:
    while True:
        try: time.sleep(600)
        except KeyboardInterrupt: pass
time.sleep(600)
"""


@pytest.mark.slow  # `make test` runs test_a_rank_that_no_interrupt_stops_is_started_again
def test_a_rank_that_does_not_stop_is_ended(cluster: Cluster, settings: Callable[..., None]) -> None:
    """After RING_STOP_LIMIT, and as soon as the user asks; no limit runs while nobody stops the run."""
    settings(stop_limit=1)
    run = cluster.run(STUBBORN)
    assert not run._watch.ended.wait(2.0)
    assert not run.stop(0.5)
    assert "`%ring restart --rank 1` ends rank 1 alone and starts it again, which happens 1 s after" in run.advice()
    with pytest.raises(ClusterError, match=r"rank 1 was ended: it had not stopped 1 s after an interrupt"):
        run.wait()
    assert run.ended_ranks == [1]
    assert cluster.heal(run.ended_ranks) == [1]
    assert names(cluster) == ["int 0", None, "int 2"]
    settings(stop_limit=0)
    run = cluster.run(STUBBORN)
    until(lambda: 1 in (statuses := run.log.statuses()) and statuses[1].line > 3)
    assert not run.stop(1.5)
    cluster.end([1])
    assert "rank 1 was ended by `%ring restart --rank`" in str(run.error)
    assert cluster.heal() == [1]
    assert_whole(cluster)


def test_some_ranks_execute_a_cell_that_is_for_all(cluster: Cluster) -> None:
    run = ended(cluster.run("where = ring.rank(), ring.size()", only=[2]))
    assert run.status == "ok"
    assert [kinds.get("where") for kinds in cluster.variables("where")] == [None, None, "tuple of 2"]
    assert cluster.pull("where", 2) == (2, 3)
    run = ended(cluster.run("ring.barrier()", only=[2]))
    assert isinstance(run.error, CollectiveAborted)


@contextlib.contextmanager
def when_it_starts(cluster: Cluster, act: Callable[[int], object]) -> Iterator[None]:
    """While the block heals, call ``act`` with the process id of the engine that it starts."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.pid not in before and "ring_notebook.engine.engine_program" in child.cmdline():
                        act(child.pid)
                        return
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_the_new_engine_dies_while_it_starts(cluster: Cluster) -> None:
    kill(cluster, 2)
    with (
        when_it_starts(cluster, lambda pid: os.kill(pid, signal.SIGKILL)),
        pytest.raises(ClusterError, match=r"rank 2 on .* was killed by SIGKILL.* while it started"),
    ):
        cluster.heal()
    assert cluster.living == [0, 1]
    assert ended(cluster.run(SUM, ranks=[0, 1])).status == "ok"
    assert cluster.heal() == [2]
    assert names(cluster) == ["int 0", "int 1", None]
    assert_whole(cluster)


@pytest.mark.slow  # `make test` runs test_the_new_engine_dies_while_it_starts
def test_the_new_engine_dies_before_it_is_known(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has registered, and nobody watches its process yet: the heal does not wait for its answer."""
    kill(cluster, 2)
    started: list[int] = []

    def prepare(*given: Any) -> list[Engine]:
        os.kill(started[-1], signal.SIGKILL)
        return prepare_engines(*given)

    with monkeypatch.context() as patch, when_it_starts(cluster, started.append):
        patch.setattr("ring_notebook.notebook.cluster.heal.prepare_engines", prepare)
        patch.setattr("ring_notebook.notebook.cluster.heal._TIMEOUT", 20.0)
        with pytest.raises(ClusterError, match=r"rank 2 on .* was killed by SIGKILL.* while it started"):
            cluster.heal()
    assert cluster.heal() == [2]
    assert names(cluster) == ["int 0", "int 1", None]
    assert_whole(cluster)


def test_the_new_engine_dies_before_its_heart_beats(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has asked the controller for its number, which the one after it gets all the same."""
    processes = cluster._processes
    assert processes is not None
    monitor = psutil.Process(processes.pids["controller"]).children()[0]

    def accepted() -> int:
        return processes.log("controller").count("::accepting registration 2:")

    def die(pid: int) -> None:
        until(lambda: accepted() > before)
        os.kill(pid, signal.SIGKILL)

    kill(cluster, 2)
    before = accepted()
    monitor.suspend()  # so that its heart is not heard
    try:
        with when_it_starts(cluster, die), pytest.raises(ClusterError, match=r"rank 2 on .* was killed by SIGKILL"):
            cluster.heal()
    finally:
        monitor.resume()
    monkeypatch.setattr("ring_notebook.notebook.cluster.heal.REGISTERING", 20.0)
    assert cluster.heal() == [2]
    assert names(cluster) == ["int 0", "int 1", None]
    assert_whole(cluster)


def test_a_dead_engine_asks_for_its_number_late(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has sent arrives when the controller has forgotten it, before the new one asks."""

    def forget_and_ask(engines: Engines, rank: int, formation: int, timeout: float) -> None:
        forget(engines, rank, formation, timeout)
        client = engines._client
        content = {"uuid": "of the dead", "id": rank}
        client._send(client._query_stream, "registration_request", content=content, metadata={FORMATION: formation})

    kill(cluster, 2)
    forget = Engines.forget
    with monkeypatch.context() as patch:
        patch.setattr(Engines, "forget", forget_and_ask)
        patch.setattr("ring_notebook.notebook.cluster.heal.REGISTERING", 20.0)
        assert cluster.heal() == [2]
    assert names(cluster) == ["int 0", "int 1", None]
    assert_whole(cluster)


@contextlib.contextmanager
def engine_beside(cluster: Cluster, rank: int, formation: int) -> Iterator[subprocess.Popen[str]]:
    """An engine of ``rank``, started for ``formation``, that no supervisor knows: as on a host that was lost."""
    files = [str(path) for path in (cluster.directory / "security").glob("*-engine.json")]
    command = [
        sys.executable,
        "-m",
        "ring_notebook.engine.engine_program",
        "--log-level=ERROR",
        "--IPEngine.enable_nanny=False",
    ]
    command += [f"--file={path}" for path in files]
    variables = {"RING_RANK": str(rank), "RING_STARTED_AGAIN": str(formation)}
    with subprocess.Popen(command, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True) as other:
        try:
            yield other
        finally:
            other.kill()


def test_another_engine_takes_a_number(cluster: Cluster) -> None:
    """Who waits for the engine that had it is told at once, and a heal mends it."""
    engines = cluster._engines
    assert engines is not None
    with (
        engine_beside(cluster, 2, cluster._formation),
        pytest.raises(ClusterError, match="died while running task"),
    ):
        engines.call("time:sleep", 40.0, ranks=[2])
    assert cluster.heal([2]) == [2]
    assert names(cluster) == ["int 0", "int 1", None]
    assert_whole(cluster)


REPLACED = "rank 2 was started again elsewhere while this engine could not be reached: this one ends"


def test_an_engine_registers_after_its_replacement(cluster: Cluster) -> None:
    """A heal lost its host before it had registered, and the next one has started another: it is refused, and ends."""
    kill(cluster, 2)
    with (
        when_it_starts(cluster, lambda pid: os.kill(pid, signal.SIGKILL)),
        pytest.raises(ClusterError, match="was killed by SIGKILL"),
    ):
        cluster.heal()
    lost = cluster._formation
    assert cluster.heal() == [2]
    cluster.run("name = ring.rank()").wait()
    pids = [one.pid for one in cluster.status()]
    run = cluster.run("import time\ntime.sleep(20)", ranks=[2])
    with engine_beside(cluster, 2, lost) as late:
        _, said = late.communicate(timeout=60)
        assert late.returncode == 255
        assert REPLACED in said
        assert "Traceback" not in said
    assert not run.done
    assert run.stop(10.0)
    assert [one.pid for one in cluster.status()] == pids
    assert names(cluster) == ["int 0", "int 1", "int 2"]
    assert_whole(cluster)


@pytest.mark.slow
def test_a_registered_engine_is_back_after_its_replacement(cluster: Cluster) -> None:
    """Its host could not be reached for a while: it is told, and ends."""
    processes = cluster._processes
    assert processes is not None

    def registered() -> int:
        return processes.log("controller").count("engine::Engine Connected: 2")

    before = registered()
    with engine_beside(cluster, 2, cluster._formation) as lost:
        until(lambda: registered() > before)
        lost.send_signal(signal.SIGSTOP)
        assert cluster.heal([2]) == [2]
        cluster.run("name = ring.rank()").wait()
        pids = [one.pid for one in cluster.status()]
        lost.send_signal(signal.SIGCONT)
        _, said = lost.communicate(timeout=60)
        assert lost.returncode == 255
        assert REPLACED in said
        assert "Traceback" not in said
    assert [one.pid for one in cluster.status()] == pids
    assert names(cluster) == ["int 0", "int 1", "int 2"]
    assert_whole(cluster)


@pytest.mark.slow
def test_a_survivor_dies_while_another_is_started_again(cluster: Cluster) -> None:
    kill(cluster, 2)
    survivor = cluster.status()[0].pid
    with (
        when_it_starts(cluster, lambda _: os.kill(survivor, signal.SIGKILL)),
        contextlib.suppress(ClusterError),  # it may have been noticed in time: then rank 2 is back without rank 0
    ):
        cluster.heal()
    until(lambda: 0 not in cluster.living)
    assert 0 in cluster.heal()
    assert names(cluster) == [None, "int 1", None]
    assert_whole(cluster)


def test_an_interrupt_leaves_what_a_heal_can_mend(cluster: Cluster) -> None:
    kill(cluster, 1)
    with when_it_starts(cluster, lambda _: _thread.interrupt_main()), pytest.raises(KeyboardInterrupt):
        cluster.heal()
    assert cluster.living == [0, 2]
    assert ended(cluster.run(SUM, ranks=[0, 2])).status == "ok"
    assert cluster.heal() == [1]
    assert names(cluster) == ["int 0", None, "int 2"]
    assert_whole(cluster)


@pytest.mark.slow
def test_the_controller_dies_while_an_engine_is_started_again(cluster: Cluster) -> None:
    assert cluster._processes is not None
    controller = psutil.Process(cluster._processes.pids["controller"])
    place = str(cluster.directory)
    family = [one for one in psutil.Process().children(recursive=True) if place in " ".join(one.cmdline())]
    family += [controller, *controller.children(recursive=True)]
    kill(cluster, 1)
    with when_it_starts(cluster, lambda _: controller.kill()), pytest.raises(ClusterError, match="the controller"):
        cluster.heal()
    until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family))
    cluster.restart()
    assert_whole(cluster)


@pytest.mark.slow
def test_heals_hold_no_more_than_a_few(cluster: Cluster) -> None:
    def held() -> tuple[int, int, int, int]:
        supervisor = psutil.Process(psutil.Process(cluster.status()[0].pid).ppid())
        own = psutil.Process()
        return own.num_fds(), own.num_threads(), supervisor.num_fds(), supervisor.num_threads()

    def heal() -> None:
        kill(cluster, 2)
        cluster.heal()
        assert ended(cluster.run(SUM)).status == "ok"

    heal()
    before = held()
    for _ in range(3):
        heal()
    assert all(now <= was + 1 for now, was in zip(held(), before, strict=True)), (before, held())


@pytest.mark.slow
def test_memory_of_the_dead_goes_back(cluster: Cluster) -> None:
    """What a rank held in ring memory, which the others map, does not stay when it is replaced."""
    held = (
        "import os\nfiles = [os.stat(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')"
        " if os.path.lexists(f'/proc/self/fd/{fd}') and 'memfd:ring ' in os.readlink(f'/proc/self/fd/{fd}')]\n"
        "held = sum(file.st_blocks * 512 for file in files)"
    )
    cluster.run("kept = ring.empty(1 << 24).fill_(1)").wait()  # 64 MiB
    cluster.run(held).wait()
    assert cluster.pull("held") >= 3 << 26
    kill(cluster, 1)
    cluster.heal()
    cluster.run(held).wait()
    assert 2 << 26 <= cluster.pull("held") < 3 << 26
    assert cluster.run("assert ring.rank() == 1 or float(kept.sum()) == 1 << 24").wait().status == "ok"


def test_a_cluster_that_grows_and_shrinks(cluster: Cluster) -> None:
    """The living keep their variables; a new rank that dies is healed like any other."""
    with pytest.raises(ClusterError, match=r"the cluster has 3 engines already; `%ring resize 3` ends some"):
        cluster.grow(3)
    with pytest.raises(ClusterError, match=r"expected 1 to 2 ranks to keep, got 3; the cluster has 3 engines"):
        cluster.shrink(3)
    with pytest.raises(ClusterError, match="cannot reach a cluster that was started for this host alone"):
        cluster.grow(4, "localhost:2,elsewhere:2")
    pids = [one.pid for one in cluster.status()]
    assert cluster.grow(5) == [3, 4]
    assert [one.pid for one in cluster.status()][:3] == pids
    assert names(cluster) == ["int 0", "int 1", "int 2", None, None]
    assert_whole(cluster, TRAINS)
    kill(cluster, 1, 4)
    assert cluster.heal() == [1, 4]
    assert_whole(cluster, "import os\nassert int(os.environ['WORLD_SIZE']) == 5 or ring.rank() in (0, 2)\n")
    assert cluster.shrink(2) == [2, 3, 4]
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids[2:]))
    assert names(cluster) == ["int 0", None]
    assert_whole(cluster, "assert ring.size() == 2\n")
    kill(cluster, 0)
    assert cluster.heal() == [0], "those that were ended are not missed"
    assert cluster.grow(3) == [2]
    assert_whole(cluster)


def test_a_cluster_that_grows_before_a_dropped_engine_has_ended(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine: the supervisor reads all requests at once, and the engine ends behind them."""
    supervisor = psutil.Process(psutil.Process(cluster.status()[0].pid).ppid())
    request = Processes.request

    def go_on_when_all_are_made(self: Processes, what: Request, number: int, name: str = "") -> None:
        request(self, what, number, name)
        if what == "start":
            supervisor.resume()

    supervisor.suspend()
    try:
        cluster.shrink(2)
        with monkeypatch.context() as patch:
            patch.setattr(Processes, "request", go_on_when_all_are_made)
            assert cluster.grow(3) == [2]
    finally:
        supervisor.resume()
    assert_whole(cluster)


@pytest.mark.slow  # `make test` runs test_a_cluster_that_grows_and_shrinks
def test_a_growth_that_is_interrupted(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster is as large as before, and grows at the next try."""

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ring_notebook.notebook.cluster.heal.meet", fail)
        with pytest.raises(KeyboardInterrupt):
            cluster.grow(4)
    assert cluster.n == len(cluster.status()) == 3
    assert_whole(cluster)
    assert cluster.grow(4) == [3]
    assert_whole(cluster)
    cluster.shrink(3)
