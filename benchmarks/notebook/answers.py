"""How soon a notebook's user has an answer: start, restart, empty cell, interrupt, the next cell after each failure.

    python benchmarks/notebook/answers.py [--ranks 2] [--rounds 5] [--own-interpreters]

Medians of the rounds, each on the cluster that the one before has left. An interrupt and a death are measured from the
signal on; the next cell is a barrier of all ranks, and after a start waits until they have loaded torch. With
--own-interpreters no process forks the engines.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import psutil

from ring_notebook.errors import RingError
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.run.run import Run

BARRIER = "ring.barrier()\n"
ON_LAST = BARRIER + "import time\nif ring.rank() == ring.size() - 1:\n    {}\n" + BARRIER
FAILURES = {
    "an error on one rank": ON_LAST.format("raise ValueError"),
    "a rank that has left early": ON_LAST.format("ring.barrier()"),
    "collectives that differ": "import torch\nring.allreduce(torch.ones(2 + ring.rank()))",
}


FIRST_STEP = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = ring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


def processor_time(process: psutil.Process) -> float:
    """Seconds, with those of its children that have ended."""
    times = process.cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--own-interpreters", action="store_true")
    given = parser.parse_args()
    if given.own_interpreters:
        os.environ["RING_FORK_SERVER"] = "@nobody"
    os.environ["RING_RUNS_DIR"] = str(Path(tempfile.mkdtemp(prefix="ring-answers-")) / "runs")
    found: dict[str, list[float]] = defaultdict(list)
    with Cluster(given.ranks) as cluster:
        found["start of a cluster"].append(cluster.seconds_to_start)
        found["first training step after it"].append(next_cell(cluster, FIRST_STEP))
        below = psutil.Process().children(recursive=True)
        found["processor time until then, all processes"].append(sum(map(processor_time, below)))
        found["memory of all processes then (MB)"].append(sum(one.memory_full_info().pss for one in below) / 1e6)
        for _ in range(given.rounds):
            measure(cluster, lambda what, seconds: found[what].append(seconds))
    print(f"{given.ranks} ranks, medians of {given.rounds} (start: 1), seconds\n\n| | s |\n|---|---|")
    for what, seconds in found.items():
        print(f"| {what} | {statistics.median(seconds):.3f} |")


def measure(cluster: Cluster, add: Callable[[str, float], None]) -> None:
    """One round: every figure once."""
    cluster.run("import torch").wait()
    add("empty cell", next_cell(cluster, "pass"))
    add("cell with a barrier", next_cell(cluster))
    run = begun(cluster, ON_LAST.format("time.sleep(100)"))
    started = time.perf_counter()
    assert run.stop()
    add("interrupt in a collective", time.perf_counter() - started)
    add("next cell after an interrupt", next_cell(cluster))
    for name, source in FAILURES.items():
        failed(cluster.run(source))
        add(f"next cell after {name}", next_cell(cluster))
    run = begun(cluster, ON_LAST.format("time.sleep(100)"))
    os.kill(cluster.status()[-1].pid, signal.SIGKILL)
    started = time.perf_counter()
    failed(run)
    add("killed rank: until the cell has failed", time.perf_counter() - started)
    started = time.perf_counter()
    cluster.heal()
    add("killed rank: heal", time.perf_counter() - started)
    add("next cell after a heal", next_cell(cluster))
    cluster.restart()
    add("restart", cluster.seconds_to_start)
    add("next cell after a restart", next_cell(cluster))


def next_cell(cluster: Cluster, source: str = BARRIER) -> float:
    """Seconds that a cell takes."""
    started = time.perf_counter()
    cluster.run(source).wait()
    return time.perf_counter() - started


def begun(cluster: Cluster, source: str) -> Run:
    """A run whose first rank waits in a collective."""
    run = cluster.run(source)
    while not run.state()["ranks"][0]["waiting"]:
        time.sleep(0.01)
    return run


def failed(run: Run) -> None:
    """Return when ``run`` has failed."""
    try:
        run.wait()
    except (RingError, ValueError):
        return
    raise AssertionError(f"{run} has not failed")


if __name__ == "__main__":
    main()
