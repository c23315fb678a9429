"""Interrupts, time limits and failures end a run within a second; the next cell works."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from harness.waiting import LIMIT, until
from ring_notebook.errors import CollectiveAborted, RunTimeout
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.panel.headline import headline
from ring_notebook.notebook.run.run import Run

BARRIER = "from ring_notebook.core import world\nbarrier = world.current().communicator.barrier\n"
WAITS = {
    "sleep": "import time\ntime.sleep(600)",
    "loop": "while True: pass",
    "collective": BARRIER + "if world.current().rank == 0: barrier()\nelse:\n    import time; time.sleep(600)",
    "lock": "import threading\nthreading.Event().wait()",
    "child": "import subprocess\nsubprocess.run(['sleep', '600'])",
    "worker": (
        "import torch.utils.data, time\n"
        "class Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, index): time.sleep(600)\n"
        "list(torch.utils.data.DataLoader(Slow(), num_workers=1))"
    ),
}


def begun(run: Run) -> None:
    """Return when all ranks are past the first line of the cell."""
    until(lambda: [status.line > 1 for status in run.log.statuses().values()] == [True] * run.log.size)
    time.sleep(0.3)


def next_cell_works(cluster: Cluster) -> None:
    assert cluster.run(BARRIER + "barrier()").wait().status == "ok"


@pytest.mark.parametrize("wait", WAITS)
def test_stop_interrupts_every_rank(cluster: Cluster, wait: str) -> None:
    if wait == "worker":
        cluster.run("import torch").wait()
    run = cluster.run("kept = 1\n" + WAITS[wait])
    begun(run)
    if wait == "worker":
        time.sleep(1)  # until the worker is at work
    assert run.stop() is True
    with pytest.raises(KeyboardInterrupt, match="stopped at line"):
        run.wait()
    assert run.status == "interrupted"
    assert run.summary["status"] == "interrupted"
    assert cluster.pull("kept") == 1
    next_cell_works(cluster)


def test_an_interrupted_collective_says_its_line(cluster: Cluster) -> None:
    """Whether its interrupt or that of the other rank arrives first."""
    run = cluster.run("if ring.rank() == 0: ring.barrier()\nelse:\n    import time; time.sleep(600)")
    until(lambda: [status.line for _, status in sorted(run.log.statuses().items())] == [1, 3])
    run.stop()
    with pytest.raises(KeyboardInterrupt, match=r"stopped at lines? (1, )?3 of the cell"):
        run.wait()


def test_a_call_left_out_within_a_loop_is_told_while_the_ranks_go_on(cluster: Cluster) -> None:
    """The next call of the rank that has left one out meets the one before it of the other."""
    run = cluster.run(
        "import time, torch\nfor step in ring.track(range(100_000)):\n    time.sleep(0.005)\n"
        "    if step != 40 or ring.rank() == 0:\n        ring.allreduce(torch.ones(1))"
    )
    until(lambda: run.done or bool(headline(run.log, run.view).alarms))
    (said,) = headline(run.log, run.view).alarms
    run.stop()
    found = re.fullmatch(
        r"(\d+) calls on rank 0, (\d+) on rank 1 before step (\d+) of the loop at line 2; they part after step (\d+)",
        said,
    )
    assert found is not None, said
    first, second, step, since = map(int, found.groups())
    assert first == step == second + 1
    assert since <= 40 < step


def test_a_second_and_third_interrupt_report_and_give_up(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = (
        f"import pathlib, time\nenough = pathlib.Path({str(tmp_path / 'enough')!r})\nwhile not enough.exists():\n"
        "    try: time.sleep(0.1)\n    except KeyboardInterrupt: pass"
    )
    run = cluster.run(stubborn)
    begun(run)
    waits, interrupted = threading.Event(), threading.Semaphore(0)
    looks, stops = run._questions.answer_one, run.interrupt
    monkeypatch.setattr(run._questions, "answer_one", lambda: (waits.set(), looks()))
    monkeypatch.setattr(run, "interrupt", lambda: (stops(), interrupted.release()))

    def user() -> None:
        for _ in range(3):
            waits.clear()
            assert waits.wait(LIMIT)
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupted.acquire(timeout=LIMIT)

    thread = threading.Thread(target=user)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        run.wait()
    thread.join()
    assert "rank 0 is at line" in capsys.readouterr().out
    assert "%ring restart" in "".join(caught.value._render_traceback_())  # type: ignore[attr-defined]
    (tmp_path / "enough").touch()
    until(lambda: run.done)
    next_cell_works(cluster)


def test_the_time_limit_stops_by_itself(cluster: Cluster) -> None:
    with pytest.raises(RunTimeout, match=r"--timeout 0\.5 s and was stopped\nranks? "):
        cluster.run(WAITS["sleep"], timeout=0.5).wait()
    forgotten = BARRIER + "import time\nif world.current().rank:\n    time.sleep(600)\nbarrier()"
    with pytest.raises(RunTimeout, match=r"rank 1 (is )?at line \d+: time.sleep\(600\)"):
        cluster.run(forgotten, timeout=3).wait()
    next_cell_works(cluster)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("other", ["barrier()", "import time; time.sleep(600)", "while True: pass", "pass"])
def test_the_first_failure_ends_the_run(cluster: Cluster, rank: int, other: str) -> None:
    run = cluster.run(
        BARRIER + f"barrier()\nif world.current().rank == {rank}:\n    [][3]\nelse:\n    {other}", first_line=2
    )
    with pytest.raises(IndexError, match="list index out of range") as caught:
        run.wait()
    shown = "\n".join(caught.value._render_traceback_())  # type: ignore[attr-defined]
    assert shown.count("Traceback") == 1
    assert "Cell, line 6" in shown
    assert f"raised on rank {rank}" in shown
    assert run.status == "failed"
    next_cell_works(cluster)


def test_a_rank_that_returns_early_is_named(cluster: Cluster) -> None:
    with pytest.raises(CollectiveAborted, match="rank 1 has left"):
        cluster.run(BARRIER + "if world.current().rank == 0: barrier()").wait()
    next_cell_works(cluster)


@pytest.mark.parametrize("gone", [0, 1])
def test_an_init_that_waits_for_a_rank_that_has_ended_its_cell(cluster: Cluster, gone: int) -> None:
    cell = f"rank = ring.rank()\nring.shutdown()\nif rank != {gone}: ring.init()"
    with pytest.raises(CollectiveAborted, match=f"rank {gone} finished its cell"):
        cluster.run(cell).wait()
    next_cell_works(cluster)


def test_a_call_that_a_rank_leaves_out_is_told_while_the_others_wait(cluster: Cluster, tmp_path: Path) -> None:
    source = (
        "import pathlib, time, torch\n"
        "def train(steps):\n"
        "    for step in range(steps):\n"
        "        ring.allreduce(torch.ones(2))\n"
        "train(3 - ring.rank())\n"
        f"while not pathlib.Path('{tmp_path / 'told'}').exists():\n"
        "    time.sleep(0.01)\n"
    )
    run = cluster.run(source)
    alarms = until(lambda: headline(run.log, run.view).alarms)
    (tmp_path / "told").touch()
    where = "the last differs at line 4: ring.allreduce(torch.ones(2)), which rank 1 has left"
    assert alarms == (f"3 calls on rank 0, 2 on rank 1; {where}",)
    with pytest.raises(CollectiveAborted, match="rank 1"):
        run.wait()


def test_an_exception_class_of_the_cell_comes_back(cluster: Cluster) -> None:
    source = BARRIER + "class Mine(Exception): pass\nif world.current().rank: raise Mine('x', 3)\nbarrier()"
    with pytest.raises(Exception, match="'x', 3") as caught:
        cluster.run(source).wait()
    assert type(caught.value).__name__ == "Mine"


@pytest.mark.parametrize("source", ["import sys; sys.exit()", "exit()", "quit()", "get_ipython().ask_exit()"])
def test_an_exit_ends_the_cell_alone(cluster: Cluster, source: str) -> None:
    assert cluster.run(f"kept = 5\n{source}\nkept = 6").wait().status == "ok"
    for _ in range(3):  # an engine whose loop is told to end still takes a cell or two
        assert cluster.run("__import__('time').sleep(0.3)").wait().status == "ok"
    assert cluster.pull("kept") == 5


@pytest.mark.parametrize("what", ["dumps = None", "dumps = lambda *_, **__: b''", "loads = None"])
def test_an_engine_answers_whatever_a_cell_makes_of_json(cluster: Cluster, what: str) -> None:
    """Its messages are JSON. A cell that speeds `json` up with orjson, say, has functions that return bytes."""
    runs = [cluster.run(f"import json\nkept = json.dumps, json.loads\njson.{what}")]
    until(lambda: runs[0].done)
    runs.append(cluster.run("json.dumps, json.loads = kept"))
    until(lambda: runs[1].done)
    assert [run.status for run in runs] == ["ok", "ok"]


@pytest.mark.parametrize("loop", ["asyncio.get_event_loop()", "tornado.ioloop.IOLoop.current()"])
def test_a_cell_cannot_stop_the_loop_of_its_engine(cluster: Cluster, loop: str) -> None:
    """It would end the engine, as it ends a Jupyter kernel."""
    with pytest.raises(RuntimeError, match="this event loop runs the engine"):
        cluster.run(f"import asyncio, tornado\nkept = 7\n{loop}.stop()").wait()
    for _ in range(3):
        assert cluster.run("__import__('time').sleep(0.3)").wait().status == "ok"
    assert cluster.pull("kept") == 7
