"""What the gate before operations of Gloo costs: sums with and without it, in turn, in one run.

    ringrun -np 2 python benchmarks/torch_gate.py [--sizes 4,65536,16777216] [--rounds 40]

"Waits" is ``dist.all_reduce(tensor)``, "asynchronous" passes ``async_op=True`` and waits at once. Medians over the
rounds of the slowest rank's mean, in microseconds.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from allreduce import human

import ring_notebook.torch as ring
from ring_notebook.torch.process_group import gate

TURN = 0.02
"""Seconds of calls in a row."""


def mean(call: Callable[[], object], count: int) -> float:
    """Seconds of one of ``count`` calls, on the slowest rank."""
    call()
    ring.barrier()
    began = perf_counter()
    for _ in range(count):
        call()
    spent = (perf_counter() - began) / count
    return float(ring.allreduce(torch.tensor([spent], dtype=torch.float64), op=ring.Max).item())


def measure(tensor: torch.Tensor, rounds: int) -> dict[str, float]:
    """Median seconds of each way to sum ``tensor``."""
    ways: dict[str, Callable[[], object]] = {
        "waits": lambda: dist.all_reduce(tensor),
        "asynchronous": lambda: dist.all_reduce(tensor, async_op=True).wait(),
    }
    times: defaultdict[str, list[float]] = defaultdict(list)
    count = max(1, min(200, int(TURN / mean(ways["waits"], 3))))
    for _ in range(rounds):
        for change, label in ((gate.remove, "without"), (gate.install, "with")):
            change()
            for way, call in ways.items():
                times[f"{way}, {label}"].append(mean(call, count))
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4,65536,16777216", help="bytes, separated by commas")
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    ring.init()
    torch.set_num_threads(1)
    ring.process_group("gloo")
    for index, nbytes in enumerate(int(size) for size in arguments.sizes.split(",")):
        times = measure(torch.zeros(nbytes // 4), arguments.rounds)
        if ring.rank() == 0:
            if index == 0:
                print("| bytes | " + " | ".join(times) + " |\n" + "|---" * (len(times) + 1) + "|")
            print(
                f"| {human(nbytes)} | " + " | ".join(f"{time * 1e6:.0f}" for time in times.values()) + " |", flush=True
            )
    ring.shutdown()


if __name__ == "__main__":
    main()
