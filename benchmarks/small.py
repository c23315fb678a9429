"""Small allreduces from Python: at once, asynchronous and grouped, beside MPI, in one run.

    ringrun -np 2 python benchmarks/small.py [--sizes 4,1024] [--seconds 2]

All are called in turn, over and over, a thousand of each at a time; medians of the slowest rank in microseconds.
"""

from __future__ import annotations

import argparse

import torch
from allreduce import Call, human, measure, mpi

import ring_notebook.torch as ring


def candidates(count: int) -> dict[str, Call]:
    """What is measured, by name. A group is two tensors, which makes one operation."""
    one, group = torch.zeros(count), [torch.zeros(count), torch.zeros(count)]
    return {
        "allreduce_": lambda: ring.allreduce_(one, op=ring.Sum),
        "asynchronous": lambda: ring.synchronize(ring.allreduce_async_(one, op=ring.Sum)),
        "grouped": lambda: ring.grouped_allreduce_(group, op=ring.Sum),
        "grouped, asynchronous": lambda: ring.synchronize(ring.grouped_allreduce_async_(group, op=ring.Sum)),
        "mpi": mpi(torch.zeros(count)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4,16,64,256,1024", help="bytes, separated by commas")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each size")
    arguments = parser.parse_args()
    ring.init()
    torch.set_num_threads(1)
    for index, nbytes in enumerate(int(size) for size in arguments.sizes.split(",")):
        times = measure(candidates(nbytes // 4), arguments.seconds, turn=4e-3)
        if ring.rank() == 0:
            if index == 0:
                print("| bytes | " + " | ".join(times) + " |\n" + "|---" * (len(times) + 1) + "|")
            print(
                f"| {human(nbytes)} | " + " | ".join(f"{time * 1e6:.1f}" for time in times.values()) + " |", flush=True
            )
    ring.shutdown()


if __name__ == "__main__":
    main()
