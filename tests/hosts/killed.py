"""A job in which a process or a host is killed; a program, run on every rank: ``killed.py WHO VICTIM DEAD WHEN KIND``.

WHO is "rank", "agent", "host" or "supervisor": the rank VICTIM is killed, what has started it, or its whole host. DEAD
are the ranks that end with it, as "2,3". WHEN is "start", "collective", "between" or "end", KIND "plain" or "elastic".
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ring_notebook.api.basics import barrier, init, rank, size
from ring_notebook.api.elastic_training import run
from ring_notebook.api.object_state import ObjectState
from ring_notebook.api.objects import allreduce_numbers
from ring_notebook.core.communicator import ReduceOp

STARTERS = {"agent": "ring_notebook.launch.remote.agent", "supervisor": "ring_notebook.launch.supervise"}
"""The modules of the processes that start ranks."""


def kill(who: str, pid: int) -> None:
    """Kill the process ``pid``, which is a rank, its agent or supervisor, or all of its host, whose link goes first."""
    if who == "rank":
        os.kill(pid, signal.SIGKILL)
    elif who == "host":
        _kill_host(pid)
    else:
        for number in _starters(STARTERS[who], pid):
            with contextlib.suppress(OSError):  # it has just ended
                os.kill(number, signal.SIGKILL)


def _starters(module: str, pid: int) -> list[int]:
    """The process of ``module`` that has started ``pid``; where a fork server has, all of its host."""
    started = pid
    while started > 1:
        if module in _command(started):
            return [started]
        started = _parent(started)
    return [number for number in _on_host_of(pid) if module in _command(number)]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _kill_host(pid: int) -> None:
    """Cut the link of the network namespace of ``pid``, and kill all processes there.

    This one is last, behind those that have started it: the end of an agent ends its ranks.
    """
    numbers = _on_host_of(pid)
    command = ["nsenter", "--target", str(pid), "--net", "ip", "link", "set", "link0", "down"]
    subprocess.run(command, check=True)
    line = [os.getpid()]
    while line[-1] > 1:
        line.append(_parent(line[-1]))
    for number in sorted(numbers, key=lambda number: -line.index(number) if number in line else -len(line)):
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)


def _on_host_of(pid: int) -> list[int]:
    """The processes in the network namespace of ``pid``."""
    there = os.readlink(f"/proc/{pid}/ns/net")
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/net") == there:
                found.append(int(entry))
    return found


class Killing:
    """What a rank has to know of the kill."""

    def __init__(self, who: str, victim: int, dead: list[int], when: str) -> None:
        self._who, self._victim, self._dead, self._when = who, victim, dead, when

    def at(self, moment: str, me: int) -> None:
        """Be at a moment: the victim kills, the others that die with it wait for that."""
        if moment == self._when and me == self._victim:
            kill(self._who, os.getpid())
        if moment == self._when and me in self._dead:
            time.sleep(600)

    def add(self, total: int, me: int, strikes: bool) -> int:
        """One more for each rank. Where the kill ``strikes``, the victim is killed while it waits for another rank."""
        if strikes and self._when == "collective":
            if me == self._victim:
                threading.Timer(0.3, kill, (self._who, os.getpid())).start()
            elif me == (self._victim + 1) % 4:
                time.sleep(1.0)
        return total + allreduce_numbers([1], ReduceOp.SUM, "one each")[0]


def main() -> None:
    """Entry point."""
    who, victim, dead, when, kind = sys.argv[1:]
    me = int(os.environ["RING_RANK"])
    killing = Killing(who, int(victim), [int(number) for number in dead.split(",")], when)
    killing.at("start", me)
    init()
    state = ObjectState(total=0)

    def train(state: ObjectState) -> None:
        while state.total < 24:
            if state.total == 12:
                killing.at("between", me)
            state.total = killing.add(state.total, me, strikes=state.total == 12 and size() == 4)
            state.commit()

    (run(train) if kind == "elastic" else train)(state)
    barrier()
    killing.at("end", me)
    os.write(1, b"rank %d of 4 ended as number %d of %d\n" % (me, rank(), size()))


if __name__ == "__main__":
    main()
