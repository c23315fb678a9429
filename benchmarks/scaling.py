"""How near the predictions of `ringrun --scale --predict` come: sizes held out here, and published ones beside.

    sudo .venv/bin/python benchmarks/scaling.py [--rates 200mbit,1gbit] [--repeat 3] [--batch 256 | --sleep 0.1]
    .venv/bin/python benchmarks/scaling.py --published

The first joins four network namespaces by links that tbf limits, and has `ringrun` measure a training on one to four of
them; four is predicted from the others. All of them are on this machine, so each gets a fifth of its processor time:
hosts do not take one another's, if nothing else runs. Where something does, a sleep takes the place of compute, which
tries the terms for link and stragglers only. The second sets what the model gives for three networks on 512 GPUs beside
what Horovod reached.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from statistics import median
from threading import Event, Thread
from typing import Any

from ring_notebook.analysis.prediction import BACKWARD, StepModel, expected_maximum

# Sergeev and Del Balso 2018 (arXiv 1802.05799): 128 hosts with 4 Pascal GPUs each and 25 Gbit/s. Parameters are those
# of the networks; samples/s of one P100 with batches of 64 are those that TensorFlow published for Inception V3 and
# VGG-16 (tensorflow.org/performance/benchmarks, 2017), and a 16th of Horovod's 1656.82 on 16 GPUs for ResNet-101
# (its docs/benchmarks.rst).
PUBLISHED = {
    "Inception V3": (23.8e6, 142.0, 0.90),
    "ResNet-101": (44.5e6, 103.6, 0.90),
    "VGG-16": (138.4e6, 154.0, 0.68),
}
SPREAD = 0.03  # of ranks that sleep
PERIOD = 10_000  # microseconds, in which a host gets its share
GPUS, HOSTS, BATCH, LINK = 512, 128, 64, 25e9 / 8


def published() -> None:
    """Print the table of 512 GPUs."""
    # The spread is not published. The one with which Inception V3, whose communication is hidden, reaches its 90 %.
    spread = (1 / PUBLISHED["Inception V3"][2] - 1) / expected_maximum(GPUS)
    print("| network | step of one GPU | ring of 128 hosts | published | all hidden that can be | nothing hidden |")
    print("|---|---|---|---|---|---|")
    for name, (parameters, rate, reached) in PUBLISHED.items():
        cells = []
        for overlap in (BACKWARD, 0.0):
            model = StepModel(1 / rate, spread=spread, bytes=4 * parameters, rate=LINK, overlap=overlap)
            cells.append(BATCH / rate / sum(model.step(GPUS, HOSTS, BATCH).values()))
        ring = 2 * (HOSTS - 1) / HOSTS * 4 * parameters / LINK
        best, worst = (f"{cell:.0%}" for cell in cells)
        print(f"| {name} | {1e3 * BATCH / rate:.0f} ms | {1e3 * ring:.0f} ms | {reached:.0%} | {best} | {worst} |")
    print(f"\nranks differ by {spread:.1%}, which is fitted to Inception V3")


def train(batch: int, megabytes: float, steps: int, sleep: float) -> None:
    """What each rank runs: a network of four layers with so many megabytes of parameters, trained on one thread.

    With a ``sleep`` of so many seconds, a few percent more or less, and an allreduce in place of the network.
    """
    import torch

    import ring_notebook.torch as ring

    ring.init()
    torch.set_num_threads(1)
    width = int((megabytes * 250_000 / 4) ** 0.5)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    optimizer = ring.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    inputs, random, gradient = torch.randn(batch, width), Random(ring.rank()), torch.zeros(int(megabytes * 250_000))
    for _ in range(steps):
        if sleep:
            time.sleep(sleep * max(0.0, random.gauss(1, SPREAD)))
            ring.allreduce_(gradient)
        else:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        ring.log(samples=batch)


@contextmanager
def shares(hosts: Any) -> Iterator[None]:
    """In the block each host has a fifth of this machine's processor time, by a control group of its own."""
    from harness.two_hosts import pids_in

    root = Path("/sys/fs/cgroup/cpu") if Path("/sys/fs/cgroup/cpu").exists() else Path("/sys/fs/cgroup")
    groups = {f"{hosts.prefix}-{name[-1]}": root / f"{hosts.prefix}-{name[-1]}" for name in hosts.names}
    quota = PERIOD * (os.cpu_count() or 1) // 5
    for group in groups.values():
        group.mkdir()
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{quota} {PERIOD}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
    ended = Event()

    def move(pids: Iterable[int], group: Path) -> None:
        for pid in pids:
            with suppress(OSError):  # it has ended
                (group / "cgroup.procs").write_text(str(pid))

    def follow() -> None:
        while not ended.wait(0.2):
            for space, group in groups.items():
                move(pids_in(space), group)

    thread = Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for group in groups.values():
            move(map(int, (group / "cgroup.procs").read_text().split()), root)
            group.rmdir()


def held_out(rates: list[str], repeat: int, flags: list[str]) -> None:
    """Print what four hosts reach beside what one, two and three of them predict."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from harness.two_hosts import missing, two_hosts

    if reason := missing():
        sys.exit(f"hosts cannot be made here: {reason}")
    errors = []
    print("| link | 1 host | 2 | 3 | 4 measured | 4 predicted | interval | off by |\n|---|---|---|---|---|---|---|---|")
    for rate in rates:
        with two_hosts(rate, 4) as hosts, shares(hosts), tempfile.TemporaryDirectory() as folder:
            where = ",".join(f"{name}:1" for name in hosts.names)
            file = f"{folder}/scale.csv"
            scale = ["--scale", "1,2,3,4", "--predict", "4", "--repeat", str(repeat), "--warmup", "5", "--csv", file]
            command = [sys.executable, "-m", "ring_notebook.launch.cli", "-H", where, *scale]
            said = hosts.on_first([*command, sys.executable, str(Path(__file__).resolve()), "--rank", *flags])
            with open(file) as table:
                rows = list(csv.DictReader(table))
        pace = [float(row["samples_per_s"]) for row in rows]
        off = pace[4] / pace[3] - 1
        errors.append(abs(off))
        low, high = (float(rows[4][end]) for end in ("low", "high"))
        cells = " | ".join(f"{one:.1f}" for one in pace)
        print(f"| {rate} | {cells} | {low:.0%} to {high:.0%} | {off:+.1%} |", flush=True)
        print(*re.findall("^Predicted.*", said, re.MULTILINE), file=sys.stderr)
    print(f"\nmedian error {median(errors):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="100mbit,200mbit,500mbit,1gbit", help="of the links, as tc writes them")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each size")
    parser.add_argument("--batch", type=int, default=256, help="samples of a rank")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds of a step, in place of compute")
    parser.add_argument("--megabytes", type=float, default=1.0, help="of gradients")
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--published", action="store_true", help="the table of 512 GPUs, without a measurement")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        train(given.batch, given.megabytes, given.steps, given.sleep)
    elif given.published:
        published()
    else:
        names = ("batch", "megabytes", "steps", "sleep")
        flags = [word for name in names for word in (f"--{name}", str(getattr(given, name)))]
        held_out(given.rates.split(","), given.repeat, flags)


if __name__ == "__main__":
    main()
