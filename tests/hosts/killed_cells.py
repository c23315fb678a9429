"""A notebook, one engine, agent, supervisor or host of which is killed; a program, run on the first host.

``killed_cells.py WHO VICTIM DEAD HOSTS PLACES PREFIX FOLDER NAMES WHEN...``: WHO to DEAD and WHEN are those of
`hosts.killed`, PLACES has the letter of each rank's host, and the others describe the hosts (`TwoHosts`).
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pytest

from harness.two_hosts import TwoHosts
from harness.waiting import until
from hosts.killed import kill
from ring_notebook.errors import ClusterError
from ring_notebook.notebook.cluster.cluster import Cluster

CELL = """
from hosts.killed import Killing
killing = Killing({who!r}, {victim}, {dead}, {when!r})
total = 0
for step in range(4):
    if step == 2:
        killing.at("between", ring.rank())
    total = killing.add(total, ring.rank(), strikes=step == 2)
ring.barrier()
killing.at("end", ring.rank())
"""
ADDS = "from hosts.killed import Killing\nassert Killing('', 0, [], '').add(0, ring.rank(), False) == {size}"


class Matrix(NamedTuple):
    """The column of one victim."""

    who: str
    victim: int
    dead: list[int]
    where: str
    places: str
    hosts: TwoHosts

    @property
    def words(self) -> str:
        """What the error says, as a pattern."""
        if self.who == "supervisor":
            return "the launcher of the engines died"
        host = f"ring-{self.places[self.victim]}"
        if self.who == "rank":
            return f"rank {self.victim} on {host} was killed by SIGKILL, not out of memory"
        return f"rank {self.dead} on {host} failed: its host is lost"

    def start(self) -> None:
        """A process is killed while the cluster starts, which then says so."""
        Thread(target=self._kill_at_start).start()
        with pytest.raises(ClusterError, match=self.words):
            Cluster(4, self.where).start()

    def _kill_at_start(self) -> None:
        rank = f"RING_RANK={self.victim}".encode()

        def killed() -> bool:
            for pid in self.hosts.pids():
                with suppress(OSError):
                    if rank in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                        kill(self.who, pid)
                        return True
            return False

        until(killed)

    def run(self, cluster: Cluster, when: str) -> None:
        """A process is killed in a cell; the ranks that live keep their variables, and the others come back."""
        cluster.run("mine = ring.rank()").wait()
        run = cluster.run(CELL.format(who=self.who, victim=self.victim, dead=self.dead, when=when))
        with pytest.raises(ClusterError, match=self.words):
            run.wait()
        if len(self.dead) == 4:
            return
        living = [rank for rank in range(4) if rank not in self.dead]
        until(lambda: cluster.living == living)
        cluster.run(ADDS.format(size=len(living)), ranks=living).wait()
        if self.who == "host":
            self.hosts.revive(f"ring-{self.places[self.victim]}")
        assert cluster.heal() == self.dead
        cluster.run(ADDS.format(size=4)).wait()
        assert [cluster.variables("mine")[rank].keys() for rank in self.dead] == [set()] * len(self.dead)
        assert [cluster.pull("mine", rank) for rank in living] == living


def main() -> None:
    """Entry point."""
    who, victim, dead, where, places, prefix, folder, names, *moments = sys.argv[1:]
    hosts = TwoHosts(prefix, Path(folder), tuple(names.split(",")))
    matrix = Matrix(who, int(victim), [int(rank) for rank in dead.split(",")], where, places, hosts)
    cluster = None
    for when in moments:
        if when == "start":
            matrix.start()
            if who == "host":
                hosts.revive(f"ring-{places[int(victim)]}")
        else:
            cluster = cluster or Cluster(4, where).start()
            matrix.run(cluster, when)
            if len(matrix.dead) == 4:
                cluster.stop()
                cluster = None
        os.write(1, f"survived {when}\n".encode())
    if cluster is not None:
        cluster.stop()


if __name__ == "__main__":
    main()
