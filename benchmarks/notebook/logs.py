"""What logging costs: a flood of rows that must all reach the disk, and the time of a step that logs.

    python benchmarks/notebook/logs.py [--ranks 4] [--seconds 30] [--rate 10000]

First every rank logs ``rate`` rows a second for so long. All of them have to be in the run's file at the end, and the
notebook's process must not grow: its memory is read while the panel's view is drawn from the run as a panel does.

Then ranks, as many as there are cores, train in steps of some 10 ms. Machines drift by more than a row costs, so

- steps with and without a row take turns: the median change between neighbours is what a row costs the training thread;
- blocks of forty with a row each stand beside blocks without, with a pause between them in which rows that are under
  way arrive: the processor time of the rank's other threads in both is what shipping the rows costs, and the change
  of the whole block, with a much wider interval, contains the notebook's own work too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable

import psutil

from ring_notebook.machine.hardware import cores
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.panel import rank_table
from ring_notebook.notebook.run.run import Run

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
import time, torch
torch.set_num_threads(1)
torch.manual_seed(ring.rank())
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = ring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001))
x, y = torch.randn({batch}, 512), torch.randint(10, ({batch},))

def train(count, logs):
    global inside
    for _ in range(count):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if logs:
            started = time.perf_counter_ns()
            ring.log(loss=loss, samples={batch})
            inside += time.perf_counter_ns() - started

def others():  # processor time of all threads but this one: of those that ship the rows
    return time.process_time_ns() - time.thread_time_ns()

inside = 0
train(100, True)
steps = {{False: [], True: []}}
for pair in range({neighbours}):
    for logs in (False, True) if pair % 2 else (True, False):
        started = time.perf_counter_ns()
        train(1, logs)
        steps[logs].append(time.perf_counter_ns() - started)
blocks = {{False: [], True: []}}
for pair in range({pairs}):
    for logs in (False, True) if pair % 2 else (True, False):
        train({settle}, logs)  # until the rows of the block before are gone, and those of this one are on their way
        inside, apart, started = 0, others(), time.perf_counter_ns()
        train({count}, logs)
        took = time.perf_counter_ns() - started
        blocks[logs].append((took / {count}, inside / {count}, (others() - apart) / {count}))
"""
BATCH = 440  # a step of some 10 ms
COUNT, SETTLE = 40, 25  # steps of a block, and before it


def flood(cluster: Cluster, seconds: float, rate: int) -> None:
    """Log ``rate`` rows a second on every rank and look for them on disk."""
    kernel = psutil.Process()
    cluster.run(FLOOD.format(seconds=2, rate=rate)).wait()  # what a first run makes the kernel import
    before = kernel.memory_info().rss
    run = cluster.run(FLOOD.format(seconds=seconds, rate=rate), name="flood")
    memory, draws = [], []
    while not run.done:
        started = time.perf_counter()
        rank_table.html(rank_table.table(run.log.view()))
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


def steps(cluster: Cluster, neighbours: int, pairs: int) -> None:
    """What a row for every step costs a training step."""
    ranks = min(cluster.n, cores())
    cell = STEPS.format(batch=BATCH, neighbours=neighbours, pairs=pairs, count=COUNT, settle=SETTLE)
    cluster.run(cell, n=ranks).wait()
    for rank in range(ranks):
        single, blocks = cluster.pull("steps", rank), cluster.pull("blocks", rank)
        step = statistics.median(single[False])
        inside = statistics.median(inside for _, inside, _ in blocks[True])
        ship, idle = (statistics.median(apart for _, _, apart in blocks[logs]) for logs in (True, False))
        whole = zip(*([took for took, _, _ in blocks[logs]] for logs in (False, True)), strict=True)
        print(
            f"rank {rank} of {ranks}, steps of {step / 1e6:.2f} ms:\n"
            f"  a step with a row beside one without: {_change(zip(single[False], single[True], strict=True))}"
            f" ({inside / 1e3:.1f} us in ring.log)\n"
            f"  shipping it: {100 * (ship - idle) / step:.2f} % ({(ship - idle) / 1e3:.1f} us of other threads)\n"
            f"  blocks of {COUNT} steps: {_change(whole)}"
        )


def _change(pairs: Iterable[tuple[float, float]]) -> str:
    """The median change within pairs in %, with the interval that holds it in 95 of 100 cases (order statistics)."""
    changes = sorted(100 * (after / before - 1) for before, after in pairs)
    half = 0.98 * len(changes) ** 0.5
    low, high = int(max(0, len(changes) / 2 - half)), int(min(len(changes) - 1, len(changes) / 2 + half))
    return f"{statistics.median(changes):+.2f} % ({changes[low]:+.2f} to {changes[high]:+.2f})"


def _rows(run: Run) -> int:
    return len(run.metrics)


def main() -> None:
    """Measure and print; fails when a row is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rate", type=int, default=10_000, help="rows a second on each rank")
    parser.add_argument("--neighbours", type=int, default=3000, help="pairs of a step with a row and one without")
    parser.add_argument("--pairs", type=int, default=30, help="pairs of blocks of steps")
    options = parser.parse_args()
    with Cluster(options.ranks) as cluster:
        if options.seconds:
            flood(cluster, options.seconds, options.rate)
        if options.neighbours:
            steps(cluster, options.neighbours, options.pairs)


if __name__ == "__main__":
    main()
