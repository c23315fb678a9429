"""Allreduce of 4 B to 256 MiB: ours beside MPI, Gloo and (where it is installed) Horovod, in one run.

    ringrun -np 2 python benchmarks/allreduce.py [--sizes 4,1048576] [--seconds 1.0] [--json FILE]

``ring memory`` is a tensor of `ring.empty`, ``ordinary`` one as torch makes it.

Every candidate is called in turn, over and over, so that all of them see the same noise; the median is printed. Times
are of the slowest rank. ``algbw`` is bytes over time, ``busbw`` is nccl-tests' algbw·2(p-1)/p. The limit is what memory
allows: with B bytes/s of read and write by all ranks together, and 2 bytes moved per byte and rank, B/(2p) of algbw.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from peers import start_gloo

import ring_notebook.torch as ring

SIZES = [4 << (2 * i) for i in range(14)]  # 4 B to 256 MiB
Call = Callable[[], object]


def gloo(tensor: torch.Tensor) -> Call:
    """torch.distributed's allreduce over loopback."""
    start_gloo()
    return lambda: dist.all_reduce(tensor)


def mpi(tensor: torch.Tensor) -> Call:
    """mpi4py's Allreduce in place, on the MPI that launched this."""
    from mpi4py import MPI

    array = tensor.numpy()
    return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array, op=MPI.SUM)


def horovod(tensor: torch.Tensor) -> Call:
    """Horovod's allreduce_ in place."""
    import horovod.torch as hvd

    hvd.init()
    return lambda: hvd.allreduce_(tensor, op=hvd.Sum, name="benchmark")


def candidates(count: int) -> dict[str, Call]:
    """What is measured, by name, each on a tensor of its own."""
    in_ring = ring.empty(count, dtype=torch.float32).fill_(0)
    plain = torch.zeros(count)
    calls: dict[str, Call] = {
        "ring memory": lambda: ring.allreduce_(in_ring, op=ring.Sum),
        "ordinary": lambda: ring.allreduce_(plain, op=ring.Sum),
        "mpi": mpi(torch.zeros(count)),
        "gloo": gloo(torch.zeros(count)),
    }
    if importlib.util.find_spec("horovod") is not None:
        calls["horovod"] = horovod(torch.zeros(count))
    return calls


def timed(call: Call, repeats: int) -> float:
    """Seconds per call."""
    start = perf_counter()
    for _ in range(repeats):
        call()
    return (perf_counter() - start) / repeats


def measure(calls: dict[str, Call], seconds: float, turn: float = 1e-3) -> dict[str, float]:
    """Median time of each call in seconds, of the slowest rank, interleaved.

    A turn is as many calls as take ``turn`` seconds: one of microseconds is too short to time against the barrier
    before it, and would tell more of the caches that the others' turns have left than of itself.
    """
    inner = {}
    for name, call in calls.items():
        timed(call, 3)
        once = ring.allreduce(torch.tensor([timed(call, 3)]), op=ring.Max).item()
        inner[name] = max(1, min(1000, int(turn / once)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    stop = False
    began = perf_counter()
    while not stop:
        for name, call in calls.items():
            ring.barrier()
            times[name].append(timed(call, inner[name]))
        enough = perf_counter() - began > seconds and len(times["mpi"]) >= 7
        stop = bool(ring.broadcast(torch.tensor([enough]), 0)[0])
    return {
        name: ring.allreduce(torch.tensor([median(values)], dtype=torch.float64), op=ring.Max).item()
        for name, values in times.items()
    }


def memory_bandwidth(nbytes: int = 256 << 20, repeats: int = 9) -> float:
    """Bytes per second that all ranks together read and write when each scales its own memory in place."""
    tensor = torch.ones(nbytes // 4)
    times = []
    for _ in range(repeats):
        ring.barrier()
        start = perf_counter()
        tensor.mul_(1.0001)
        times.append(ring.allreduce(torch.tensor([perf_counter() - start], dtype=torch.float64), op=ring.Max).item())
    return 2 * nbytes * ring.size() / median(times)


def human(nbytes: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024 or unit == "MiB":
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", help="bytes, separated by commas")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each size")
    parser.add_argument("--json", type=Path, help="write the times there, too")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")] if arguments.sizes else SIZES
    ring.init()
    torch.set_num_threads(1)
    p, first = ring.size(), ring.rank() == 0
    bandwidth = memory_bandwidth()
    limit = bandwidth / (2 * p)
    rows = []
    for nbytes in sizes:
        result = measure(candidates(max(1, nbytes // 4)), arguments.seconds)
        rows.append({"bytes": nbytes, **result})
        if first and nbytes == sizes[0]:
            print(f"{p} ranks, {len(os.sched_getaffinity(0))} cores; memory moves {bandwidth / 1e9:.1f} GB/s (read and")
            print(f"write, all ranks), so no allreduce beyond the cache can exceed {limit / 1e9:.1f} GB/s.\n")
            print("| bytes | " + " | ".join(result) + " | ring/mpi | ordinary/mpi | algbw GB/s | busbw | of limit |")
            print("|---" * (len(result) + 6) + "|")
        if first:
            times = " | ".join(
                f"{time * 1e6:.1f} µs" if time < 1e-3 else f"{time * 1e3:.2f} ms" for time in result.values()
            )
            best = result["ring memory"]
            ratios = f"{result['mpi'] / best:.1f}x | {result['mpi'] / result['ordinary']:.1f}x"
            algbw = nbytes / best
            print(
                f"| {human(nbytes)} | {times} | {ratios} | {algbw / 1e9:.2f} | {algbw * 2 * (p - 1) / p / 1e9:.2f} | "
                f"{algbw / limit:.0%} |",
                flush=True,
            )
    if first and arguments.json:
        arguments.json.write_text(json.dumps({"ranks": p, "bandwidth": bandwidth, "rows": rows}, indent=1))
    ring.shutdown()


if __name__ == "__main__":
    main()
