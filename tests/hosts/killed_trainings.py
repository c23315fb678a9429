"""A training in a notebook over several hosts, whose ranks and hosts are killed, come back and join.

``killed_trainings.py WHERE PLACES PREFIX FOLDER NAMES JOINS CELL...``, a program, run on the first host. WHERE are the
hosts of four ranks, PLACES has the letter of each rank's host, PREFIX to NAMES describe the hosts (`TwoHosts`). With a
JOINS the cluster begins in these slots, and the others join it in the middle. A CELL is "WHO RANK": "rank 0",
"agent 2", "host 2", which comes back, or "cut 2", whose link comes back.

After each the living train on, then the dead are healed and all train. All have made the same steps at each point, and
the weights are those of one process that was given the same batches.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from harness.two_hosts import TwoHosts
from harness.waiting import LIMIT, until
from notebook.endurance.equal_steps import Training
from ring_notebook.notebook.cluster.cluster import Cluster

KILLS = "__import__('hosts.killed').killed.kill({who!r}, os.getpid())"
CUTS = "__import__('subprocess').run(['ip', 'link', 'set', 'link0', 'down'], check=True)"


def lose(training: Training, hosts: TwoHosts, places: str, who: str, rank: int) -> None:
    """One cell of the matrix."""
    cluster = training.cluster
    dead = [rank] if who == "rank" else [other for other, place in enumerate(places) if place == places[rank]]
    living = [other for other in range(4) if other not in dead]
    before = training.check()
    training.lose(rank, CUTS if who == "cut" else KILLS.format(who=who), LIMIT)
    until(lambda: cluster.living == living)
    training.ranks = living
    training.prepare()
    training.run(steps=3)
    assert training.check() >= before + 3
    if who == "host":
        hosts.revive(f"ring-{places[rank]}")
    elif who == "cut":
        hosts.set_link(hosts.names.index(f"ring-{places[rank]}"), "up")
    assert cluster.heal() == dead
    training.ranks = range(4)
    training.prepare()
    training.run(steps=3)
    assert training.check() >= before + 6


def main() -> None:
    """Entry point."""
    where, places, prefix, folder, names, joins, *cells = sys.argv[1:]
    hosts = TwoHosts(prefix, Path(folder), tuple(names.split(",")))
    with Cluster(hosts=joins or where) as cluster:
        training = Training(cluster, "sgd")
        training.run(steps=3)
        if joins:
            there = cluster.n
            assert cluster.grow(4, where) == list(range(there, 4))
            training.ranks = range(4)
            training.prepare()
            training.run(steps=3)
            assert training.check() == 6
            os.write(1, b"survived joins\n")
        for cell in cells:
            who, rank = cell.split()
            lose(training, hosts, places, who, int(rank))
            os.write(1, f"survived {cell}\n".encode())
        training.check_against_one_process()


if __name__ == "__main__":
    main()
