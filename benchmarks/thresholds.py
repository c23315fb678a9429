"""The two sizes by which the core chooses how an ordinary tensor is reduced, swept.

    ringrun -np P python benchmarks/thresholds.py [--rounds 9]

RING_INLINE: up to this many bytes a tensor travels in its rank's mailbox, beyond it in segments. RING_SEGMENT: the
size of those. Every setting is taken in turn, over and over, in an epoch of its own; times are medians of the slowest
rank, in microseconds, and the best of a row is in bold.
"""

from __future__ import annotations

import argparse
import os
from statistics import median
from time import perf_counter

import torch
from allreduce import human

import ring_notebook.torch as ring
from ring_notebook.config import config

KIB = 1 << 10
INLINE = [4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB]
SEGMENT = [64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB]
SWEEPS = {
    "RING_INLINE": (INLINE, [4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB]),
    "RING_SEGMENT": (SEGMENT, [64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 16384 * KIB, 65536 * KIB]),
}


def seconds_per_call(nbytes: int, turn: float = 2e-3) -> float:
    """Of an allreduce of an ordinary tensor, on this rank."""
    tensor = torch.zeros(nbytes // 4)
    for _ in range(3):
        ring.allreduce_(tensor, op=ring.Sum)
    repeats = max(1, min(200, int(turn * 5e9 / nbytes)))
    ring.barrier()
    start = perf_counter()
    for _ in range(repeats):
        ring.allreduce_(tensor, op=ring.Sum)
    return (perf_counter() - start) / repeats


def sweep(variable: str, settings: list[int], sizes: list[int], rounds: int) -> None:
    """Print the table of one variable."""
    times: dict[tuple[int, int], list[float]] = {(size, setting): [] for size in sizes for setting in settings}
    for _ in range(rounds):
        for setting in settings:
            os.environ[variable] = str(setting)
            config.cache_clear()
            ring.shutdown()
            ring.init()
            for size in sizes:
                times[size, setting].append(seconds_per_call(size))
    del os.environ[variable]
    config.cache_clear()
    ring.shutdown()
    ring.init()
    if ring.rank() == 0:
        print(f"| bytes | {' | '.join(f'{variable}={human(setting)}' for setting in settings)} |")
        print("|---" * (len(settings) + 1) + "|")
    for size in sizes:
        own = torch.tensor([median(times[size, setting]) for setting in settings], dtype=torch.float64)
        slowest = ring.allreduce(own, op=ring.Max).tolist()
        best = min(slowest)
        cells = [f"**{t * 1e6:.1f}**" if t == best else f"{t * 1e6:.1f}" for t in slowest]
        if ring.rank() == 0:
            print(f"| {human(size)} | {' | '.join(cells)} |", flush=True)
    if ring.rank() == 0:
        print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    ring.init()
    torch.set_num_threads(1)
    for variable, (settings, sizes) in SWEEPS.items():
        sweep(variable, settings, sizes, arguments.rounds)
    ring.shutdown()


if __name__ == "__main__":
    main()
