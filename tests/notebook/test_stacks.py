"""Where ranks are, asked while they wait for each other, sleep in foreign native code, stand still or idle."""

from __future__ import annotations

import os
import signal

from notebook.test_stopping import BARRIER, begun
from ring_notebook.notebook.cluster.cluster import Cluster

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


def test_ranks_in_a_collective_and_in_foreign_code(cluster: Cluster) -> None:
    assert [one.frames for one in cluster.stacks()] == [(), ()], "idle ranks are in no cell"
    run = cluster.run(CELL)
    begun(run)
    first, second = cluster.stacks()
    lines = CELL.splitlines()
    assert lines[first.frames[0].line - 1].strip() == "barrier()"
    assert lines[second.frames[0].line - 1].strip() == "wait()"
    assert "sleep(30)" in lines[second.frames[-1].line - 1]
    assert cluster.status()[1].run == run.log.run
    os.kill(cluster.status()[1].pid, signal.SIGSTOP)
    try:
        first, second = cluster.stacks()
        assert first.frames
        assert "does not react to signals" in second.trouble
    finally:
        os.kill(cluster.status()[1].pid, signal.SIGCONT)
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
