"""Allreduce between two hosts over a link of known rate: ours beside MPI, and how much of the link it uses.

    sudo .venv/bin/python benchmarks/hosts.py [--rate 1gbit] [--per-host 1] [--sizes 4096,16777216] [--transport mpi]

Makes two network namespaces joined by a link that tbf limits, and has `ringrun` start the ranks in them, by ssh. The
limit is what has to leave each host, 2(h-1)/h of the tensor, at the rate of the link.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch

import ring_notebook.torch as ring

SIZES = (4, 1024, 65_536, 1 << 20, 16 << 20, 64 << 20)
UNITS = {"mbit": 1e6 / 8, "gbit": 1e9 / 8}


def rank_main(rate: float, sizes: list[int], seconds: float) -> None:
    """What each rank runs: prints a row per size."""
    from allreduce import human, measure, mpi

    ring.init()
    if ring.rank() == 0:
        print(
            "| bytes | ring memory | ordinary | mpi | mpi/ring | link limit | of limit |\n|---|---|---|---|---|---|---|"
        )
    for nbytes in sizes:
        in_ring = ring.empty(nbytes // 4, dtype=torch.float32).fill_(0)
        plain = torch.zeros(nbytes // 4)
        calls = {
            "ring memory": lambda tensor=in_ring: ring.allreduce_(tensor, op=ring.Sum),
            "ordinary": lambda tensor=plain: ring.allreduce_(tensor, op=ring.Sum),
            "mpi": mpi(torch.zeros(nbytes // 4)),
        }
        # Longer turns than on one host: tbf lets what was saved up in a pause pass at once.
        times = measure(calls, seconds, turn=0.02)
        limit = nbytes / rate  # two hosts: 2(h-1)/h = 1
        if ring.rank() == 0:
            cells = " | ".join(f"{time * 1e3:.3f} ms" for time in times.values())
            ratio = times["mpi"] / times["ring memory"]
            share = limit / times["ring memory"]
            print(f"| {human(nbytes)} | {cells} | {ratio:.2f}x | {limit * 1e3:.3f} ms | {share:.0%} |", flush=True)
    ring.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it: 100mbit, 1gbit")
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each size")
    parser.add_argument("--transport", default="tcp", choices=("tcp", "mpi"), help="what ours travels over")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    number, unit = re.fullmatch(r"(\d+)([mg]bit)", arguments.rate).groups()
    if arguments.rank:
        rank_main(float(number) * UNITS[unit], [int(size) for size in arguments.sizes.split(",")], arguments.seconds)
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from harness.two_hosts import NAMES, missing, two_hosts

    if reason := missing():
        sys.exit(f"two hosts cannot be made here: {reason}")
    with two_hosts(arguments.rate) as hosts:
        flags = ["--rank", "--rate", arguments.rate, "--sizes", arguments.sizes, "--seconds", str(arguments.seconds)]
        print(f"2 hosts with {arguments.per_host} ranks each, a link of {arguments.rate}, over {arguments.transport}\n")
        where = ",".join(f"{name}:{arguments.per_host}" for name in NAMES)
        ringrun = [
            sys.executable,
            "-m",
            "ring_notebook.launch.cli",
            "--no-prefix",
            "-np",
            str(2 * arguments.per_host),
            "-H",
            where,
        ]
        program = [sys.executable, str(Path(__file__).resolve()), *flags]
        print(hosts.on_first([*ringrun, *program], environment={"RING_TRANSPORT": arguments.transport}))


if __name__ == "__main__":
    main()
