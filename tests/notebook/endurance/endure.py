"""Everything that ends a run badly, again and again.

``PYTHONPATH=tests python -m notebook.endurance.endure [TIMES [SIZE...]]``. After each the next cell has to train.
Prints the slowest end of each kind, and what kernel and engines hold (memory, descriptors, threads) before and after;
exits with an error at the first hang.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from dataclasses import dataclass

import psutil

from harness.waiting import LIMIT, until
from ring_notebook.errors import ClusterError, CollectiveAborted, CollectiveMismatch
from ring_notebook.notebook.cluster.cluster import Cluster

PRELUDE = (
    "from ring_notebook.core import world\nw = world.current()\nbarrier = w.communicator.barrier\nlast = w.size - 1\n"
)
TRAINS = (
    "import torch\nmodel = torch.nn.Linear(4, 1)\n"
    "optimizer = ring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
    "for _ in range(3):\n"
    "    optimizer.zero_grad()\n    model(torch.ones(2, 4)).sum().backward()\n    optimizer.step()\n"
)


@dataclass(frozen=True)
class Ending:
    """A cell, what it must end with, and whether it is stopped from outside or costs the cluster its life."""

    source: str
    error: type[BaseException]
    stop: bool = False
    deadly: bool = False


ENDINGS = {
    "interrupt in compute": Ending("while True: pass", KeyboardInterrupt, stop=True),
    "interrupt in a collective": Ending("if w.rank == 0: barrier()\nwhile True: pass", KeyboardInterrupt, stop=True),
    "interrupt in a sleep": Ending("import time; time.sleep(600)", KeyboardInterrupt, stop=True),
    "interrupt in a loader's worker": Ending(
        "import torch.utils.data, time\n"
        "class Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, index): time.sleep(600)\n"
        "list(torch.utils.data.DataLoader(Slow(), num_workers=1))",
        KeyboardInterrupt,
        stop=True,
    ),
    "exception before the first collective": Ending("1 / 0", ZeroDivisionError),
    "exception on rank 0": Ending("if w.rank == 0: 1 / 0\nbarrier()", ZeroDivisionError),
    "exception on the last rank": Ending("if w.rank == last: 1 / 0\nbarrier()", ZeroDivisionError),
    "exception on two ranks": Ending("if w.rank in (0, last): 1 / 0\nbarrier()", ZeroDivisionError),
    "exception after ten collectives": Ending(
        "for _ in range(10): barrier()\nif w.rank == 0: 1 / 0\nbarrier()", ZeroDivisionError
    ),
    "a rank that returns early": Ending("if w.rank != last: barrier()", CollectiveAborted),
    "a rank in an endless loop": Ending("if w.rank == 0: 1 / 0\nwhile True: pass", ZeroDivisionError),
    "wrong shape on one rank": Ending(
        "import torch\nring.allreduce(torch.ones(2 + (w.rank == 0)))", CollectiveMismatch
    ),
    "os._exit": Ending("import os\nif w.rank == 0: os._exit(1)\nbarrier()", ClusterError, deadly=True),
    "SIGKILL": Ending("import os\nif w.rank == last: os.kill(os.getpid(), 9)\nbarrier()", ClusterError, deadly=True),
    "SIGSEGV": Ending(
        "import faulthandler\nif w.rank == 0: faulthandler._sigsegv()\nbarrier()", ClusterError, deadly=True
    ),
}


def endure(cluster: Cluster, name: str) -> float:
    """End one run in this way, then train; the seconds it took to end. Raises AssertionError otherwise."""
    ending = ENDINGS[name]
    run = cluster.run(PRELUDE + ending.source)
    if ending.stop:
        until(lambda: len(run.log.statuses()) == run.log.size, LIMIT, run.describe)
        time.sleep(0.2)
        run.interrupt()
    started = time.monotonic()
    until(lambda: run.done, LIMIT, run.describe)
    seconds = time.monotonic() - started
    assert isinstance(run.error, ending.error), f"{name}: ended with {run.error!r}"
    if ending.deadly:
        cluster.restart()
    after = cluster.run(TRAINS)
    until(lambda: after.done, LIMIT, after.describe)
    assert after.error is None, f"after {name}: {after.error!r}"
    return seconds


def holdings(cluster: Cluster) -> dict[str, tuple[int, int, int]]:
    """MiB of memory, open descriptors and threads of this process and of each engine."""
    processes = {"kernel": psutil.Process()}
    processes |= {f"rank {engine.rank}": psutil.Process(engine.pid) for engine in cluster.status()}
    return {
        name: (process.memory_info().rss >> 20, process.num_fds(), process.num_threads())
        for name, process in processes.items()
    }


def main(times: int = 20, *sizes: int) -> None:
    """Each ending ``times`` in a row, at each size."""
    faulthandler.dump_traceback_later(3600, exit=True)
    for size in sizes or (2, 4):
        with Cluster(size) as cluster:
            cluster.run(TRAINS).wait()
            for name, ending in ENDINGS.items():
                before = holdings(cluster)
                slowest = max(endure(cluster, name) for _ in range(times))
                held = "" if ending.deadly else f"  held before {before}, after {holdings(cluster)}"
                print(f"n={size}  {name:32s} {times} times, slowest {slowest:.2f} s{held}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
