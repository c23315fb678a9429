"""What logging costs: a flood of rows that must all reach the disk, and the time of a step that logs.

    python benchmarks/logs.py [--ranks 4] [--seconds 30] [--rate 10000]

First every rank logs ``rate`` rows a second for so long. All of them have to be in the run's file at the end, and the
notebook's process must not grow: its memory is read while the panel's view is drawn from the run as a panel does. Then
ranks, as many as there are cores, take steps of some 10 ms, in turn a hundred with a row each and a hundred without,
and the medians are compared.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import psutil

from ring_notebook.machine import cores
from ring_notebook.notebook import table
from ring_notebook.notebook.cluster import Cluster
from ring_notebook.notebook.run import Run

FLOOD = """
import time
logged, started = 0, time.perf_counter()
while (passed := time.perf_counter() - started) < {seconds}:
    while logged < passed * {rate}:
        ring.log(loss=logged, samples=1)
        logged += 1
    time.sleep(0.001)
"""
STEPS = """
import statistics, time, torch
torch.set_num_threads(1)
x = torch.randn(512, 512)

def step():
    started = time.perf_counter()
    for _ in range({repeats}):
        y = x @ x
    return time.perf_counter() - started, y

step()
loss = torch.tensor(0.5)
silent, logging = [], []
for block in range({blocks}):
    for _ in range(100):
        seconds, y = step()
        silent.append(seconds)
    for _ in range(100):
        started = time.perf_counter()
        _, y = step()
        ring.log(loss=loss, samples=1)
        logging.append(time.perf_counter() - started)
medians = statistics.median(silent), statistics.median(logging)
"""
REPEATS = 3  # products of 512 x 512 in a step


def flood(cluster: Cluster, seconds: float, rate: int) -> None:
    """Log ``rate`` rows a second on every rank and look for them on disk."""
    kernel = psutil.Process()
    cluster.run(FLOOD.format(seconds=2, rate=rate)).wait()  # what a first run makes the kernel import
    before = kernel.memory_info().rss
    run = cluster.run(FLOOD.format(seconds=seconds, rate=rate), name="flood")
    memory, draws = [], []
    while not run.done:
        started = time.perf_counter()
        table.html(table.table(run.log.view()), colors=True)
        draws.append(time.perf_counter() - started)
        memory.append(kernel.memory_info().rss)
        time.sleep(0.2)
    run.wait()
    logged = [cluster.pull("logged", rank) for rank in range(cluster.n)]
    third = len(memory) // 3
    early, late = (sum(part) // third >> 20 for part in (memory[third : 2 * third], memory[-third:]))
    draws.sort()
    print(
        f"{cluster.n} ranks for {seconds:g} s: {sum(logged):,} rows, at least {min(logged) / seconds:,.0f} a second\n"
        f"  on disk: {_rows(run):,}\n"
        f"  memory of the notebook's process: {before >> 20} MiB before, {early} MiB in the second third,"
        f" {late} MiB in the last\n"
        f"  drawing the panel's table: {1000 * draws[len(draws) // 2]:.1f} ms, at worst {1000 * draws[-1]:.0f} ms"
    )
    if _rows(run) != sum(logged):
        raise SystemExit("rows are missing")


def steps(cluster: Cluster, blocks: int) -> None:
    """The time of a step with and without a row."""
    ranks = min(cluster.n, cores())
    cluster.run(STEPS.format(repeats=REPEATS, blocks=blocks), n=ranks).wait()
    for rank in range(ranks):
        silent, logging = cluster.pull("medians", rank)
        change = 100 * (logging / silent - 1)
        print(
            f"rank {rank} of {ranks}: a step of {1000 * silent:.2f} ms takes {change:+.2f} % with a row,"
            f" {1 / logging:.0f} rows a second"
        )


def _rows(run: Run) -> int:
    with Path(run.directory, "metrics.jsonl").open("rb") as file:
        return sum(1 for _ in file)


def main() -> None:
    """Measure and print; fails when a row is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rate", type=int, default=10_000, help="rows a second on each rank")
    parser.add_argument("--blocks", type=int, default=30, help="of 100 steps each, with and without rows")
    options = parser.parse_args()
    with Cluster(options.ranks) as cluster:
        flood(cluster, options.seconds, options.rate)
        steps(cluster, options.blocks)


if __name__ == "__main__":
    main()
