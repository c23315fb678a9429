"""A notebook whose heals are struck: the new rank, its agent or its host is killed or cut off while it is started.

A program, run on the first of two hosts: ``killed_heals.py PREFIX FOLDER NAMES ROUNDS SEED``. Each round kills ranks
of the second host, strikes the heal after a time of its own, and heals again. The heal has to end within its limit, and
the ranks of the first host keep their variables.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.two_hosts import TwoHosts
from harness.waiting import LIMIT, until
from hosts.killed import kill
from hosts.killed_cells import ADDS
from ring_notebook.analysis import time_limits
from ring_notebook.errors import ClusterError
from ring_notebook.notebook.cluster.cluster import Cluster

WHERE = "ring-a:2,ring-b:2"
AWAY = [2, 3]
STRIKES = ("rank", "agent", "host", "cut")


def processes_of(hosts: TwoHosts, rank: int) -> list[int]:
    """The processes of ``rank``, the engine before its children."""
    found = []
    for pid in hosts.pids():
        with suppress(OSError):
            if b"RING_RANK=%d" % rank in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return sorted(found)


class Strikes:
    """Strikes heals at moments of their usual length."""

    def __init__(self, hosts: TwoHosts, seed: int) -> None:
        self._hosts = hosts
        self._random = random.Random(seed)
        self._usual = 1.0  # seconds that a heal takes here

    def heal(self, cluster: Cluster) -> None:
        """Heal in peace."""
        began = time.monotonic()
        healed = cluster.heal()
        assert set(healed) <= set(AWAY)
        if healed:  # the one that was struck may have done it
            self._usual = time.monotonic() - began

    def strike(self, cluster: Cluster, how: str) -> str:
        """Heal, while somebody strikes as ``how`` says; what became of it."""
        delay = self._random.uniform(0, self._usual * 1.1)
        over = threading.Event()
        began = time.monotonic()
        with self._strikes(how, delay, over):
            try:
                cluster.heal()
                said = "healed"
            except ClusterError as error:
                said = str(error).splitlines()[0]
            over.set()
        took = time.monotonic() - began
        assert took < LIMIT, f"a heal took {took:.1f} s, struck by {how} after {delay:.2f} s: {said}"
        return f"{how} after {delay:.2f} s of {self._usual:.2f}: {took:.1f} s, {said}"

    @contextmanager
    def _strikes(self, how: str, delay: float, over: threading.Event) -> Iterator[None]:
        def strike() -> None:
            time.sleep(delay)
            if how == "cut":
                self._hosts.set_link(1, "down")
                over.wait(time_limits.SILENCE + 5)
                self._hosts.set_link(1, "up")
                return
            while not over.is_set():  # it may not be there yet
                if pids := [pid for rank in AWAY for pid in processes_of(self._hosts, rank)]:
                    with suppress(OSError):
                        kill(how, pids[-1])
                    return
                time.sleep(0.01)

        thread = threading.Thread(target=strike)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            if how == "host":
                self._hosts.revive("ring-b")


def main() -> None:
    """Entry point."""
    prefix, folder, names, rounds, seed = sys.argv[1:]
    hosts = TwoHosts(prefix, Path(folder), tuple(names.split(",")))
    strikes = Strikes(hosts, int(seed))
    with Cluster(4, WHERE) as cluster:
        cluster.run("mine = ring.rank()").wait()
        for number in range(int(rounds)):
            for victim in [AWAY[number % 2]] if number % 3 else AWAY:
                for engine in cluster.status():
                    if engine.rank == victim:
                        os.kill(engine.pid, signal.SIGKILL)
            until(lambda: cluster.living != [0, 1, 2, 3])
            said = strikes.strike(cluster, STRIKES[number % len(STRIKES)])
            # What was struck last may be noticed after the heal, and a host that was cut off.
            survivors = [cluster.pull("mine", rank) for rank in (0, 1)]
            assert survivors == [0, 1], said
            deadline = time.monotonic() + LIMIT
            problems = []
            while True:
                assert time.monotonic() < deadline, f"{said}; not whole again: {problems}"
                try:
                    strikes.heal(cluster)
                    cluster.run(ADDS.format(size=4)).wait()
                    break
                except ClusterError as error:
                    problems.append(f"{deadline - time.monotonic():.1f} s left: {error}")
            assert [cluster.pull("mine", rank) for rank in (0, 1)] == [0, 1], said
            os.write(1, f"survived {number}: {said}\n".encode())


if __name__ == "__main__":
    main()
