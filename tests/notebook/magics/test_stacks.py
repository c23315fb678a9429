"""Where ranks are, asked while they wait for each other, sleep in foreign native code, stand still or idle."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.waiting import until
from notebook.run.test_stopping import BARRIER
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.cluster.stacks import Stack, render, stacks

CELL = f"""{BARRIER}
def wait():
    import ctypes
    while True:  # the signal that asks for the stack ends a sleep
        ctypes.PyDLL(None).sleep(30)  # holds the interpreter, as badly written native code does
if world.current().rank == 0:
    barrier()
else:
    wait()
"""


def asked_until(ask: Callable[[], list[Stack]], there: Callable[[list[Stack]], bool]) -> list[Stack]:
    """The stacks once ``there`` holds: a rank that holds the interpreter cannot say that it has begun."""
    found: list[Stack] = []

    def holds() -> bool:
        found[:] = ask()
        return there(found)

    until(holds)
    return found


def lines(stack: Stack) -> list[int]:
    return [frame.line for frame in stack.frames if frame.in_cell]


def names(stack: Stack) -> str:
    return " ".join(f"{call.library}:{call.function}" for call in stack.native)


@pytest.mark.slow
def test_ranks_in_a_collective_and_in_foreign_code(cluster: Cluster) -> None:
    assert [one.frames for one in cluster.stacks()] == [(), ()], "idle ranks are in no cell"
    run = cluster.run(CELL)
    first, second = asked_until(
        cluster.stacks, lambda found: names(found[0]).startswith("_core.") and "sleep" in names(found[1])
    )
    code = CELL.splitlines()
    assert code[first.frames[0].line - 1].strip() == "barrier()"
    assert code[second.frames[0].line - 1].strip() == "wait()"
    assert "sleep(30)" in code[second.frames[-1].line - 1]
    assert "libc.so" in names(second)
    assert "PyEval" not in names(second), "the interpreter's calls are shown as Python's"
    assert "\n    native, in " in render([second], [run.log])
    assert cluster.status()[1].run == run.log.run
    os.kill(cluster.status()[1].pid, signal.SIGSTOP)
    try:
        first, second = cluster.stacks()
        assert first.frames
        assert "a signal or a debugger has stopped it" in second.trouble
    finally:
        os.kill(cluster.status()[1].pid, signal.SIGCONT)
        cluster.restart()


@pytest.mark.slow
def test_a_rank_in_the_interpreter_itself(cluster: Cluster) -> None:
    cluster.run("def power():\n    return 10 ** 10 ** 8\npower()")
    first, _ = asked_until(cluster.stacks, lambda found: "PyNumber_Power" in names(found[0]))
    assert [one.function for one in first.frames] == ["<module>", "power"]
    cluster.restart()


def test_a_rank_whose_log_is_out_of_sight_tells_it_itself(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.run(BARRIER + "if world.current().rank == 0: barrier()\nelse: import time; time.sleep(100)")
    engines = cluster._connected()
    elsewhere = tmp_path / "on another disk"
    found = asked_until(
        lambda: stacks(engines, elsewhere),
        lambda found: len(found[0].frames) == 2 and bool(found[0].native) and "sleep" in names(found[1]),
    )
    assert [one.function for one in found[0].frames] == ["<module>", "barrier"]
    assert run.stop()


@pytest.mark.slow
def test_a_cell_that_takes_the_signal_for_itself(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As does a program that checkpoints on SIGUSR1; a full disk keeps the stack out of the log too."""
    run = cluster.run("import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: None)\ntime.sleep(600)")
    monkeypatch.setattr("ring_notebook.notebook.cluster.stacks._SECONDS_TO_WRITE", 0.5)
    found = asked_until(cluster.stacks, lambda found: [lines(one) for one in found] == [[3], [3]])
    assert [[frame.function for frame in one.frames] for one in found] == [["<module>"]] * 2
    assert run.stop()
    cluster.restart()


def test_asking_does_not_disturb_threads_that_run(cluster: Cluster) -> None:
    """To read the frames of a thread that runs crashes its process now and then, so those are left alone."""
    busy = "import threading\nstop = threading.Event()\ndef work():\n    while not stop.is_set(): sum(range(100))\n"
    cluster.run(
        busy + "threads = [threading.Thread(target=work) for _ in range(4)]\nfor t in threads: t.start()"
    ).wait()
    for _ in range(50):
        assert all(not one.trouble for one in cluster.stacks())
    cluster.run("stop.set()\nfor t in threads: t.join()").wait()
