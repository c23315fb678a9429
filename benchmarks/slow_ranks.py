"""Whether the sentence about a slow rank names the right rank and the right cause.

    python benchmarks/slow_ranks.py [--seeds 20] [--seconds 6] [--only data,asleep]

Trains on two ranks with `ringrun` and makes one of them slow in ten ways, one at a time; each seed has another rank and
another severity. Then it trains without a fault. It compares what ringrun says at the end with what was done. Two of
the faults need root and control groups (cgroup v1).
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import ring_notebook.torch as ring
from ring_notebook.slow_ranks import CAUSES

ROWS, WIDTH = 256, 1024
_SAID = re.compile(r"rank (\d) is [\d.]+x slower (.+?); the others wait")
_GROUPS = Path("/sys/fs/cgroup")


def nothing() -> None:
    """A step as it is."""


def asleep(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


def compute(seconds: float) -> Callable[[], None]:
    def work() -> None:
        ends = time.thread_time() + seconds
        while time.thread_time() < ends:
            sum(range(1000))

    return work


def garbage(seconds: float) -> Callable[[], None]:
    """Collections that take about ``seconds`` a step, of a heap of lists."""
    heap = [[index] for index in range(200_000)]
    began = time.perf_counter()
    gc.collect()
    every = max(1e-3, time.perf_counter() - began) / seconds
    count = 0.0

    def collect() -> None:
        nonlocal count
        count += 1
        while count >= every:
            gc.collect()
            count -= every

    collect.heap = heap  # type: ignore[attr-defined]
    return collect


def disk(seconds: float) -> Callable[[], None]:
    """Writes and syncs files until ``seconds`` have gone."""
    file = tempfile.NamedTemporaryFile(dir=Path.cwd())  # noqa: SIM115 - it lives as long as the process
    block = os.urandom(1 << 20)

    def write() -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            os.pwrite(file.fileno(), block, 0)
            os.fsync(file.fileno())

    return write


def threads(_seconds: float) -> Callable[[], None]:
    """A thread of this process computes and takes Python's lock from the one that trains."""

    def compute_beside() -> None:
        while True:
            sum(range(100_000))

    threading.Thread(target=compute_beside, daemon=True).start()

    def let_go() -> None:
        for _ in range(5):
            time.sleep(1e-6)  # lets go of Python's lock, as reading a file does

    return let_go


def queued(_seconds: float) -> Callable[[], None]:
    """Two other processes compute on the core that this rank is bound to."""
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    for _ in range(2):
        subprocess.Popen(["timeout", "30", sys.executable, "-c", "while True: pass"])
    return nothing


def throttled(seconds: float) -> Callable[[], None]:
    """A control group gives this process a part of a core, less for more ``seconds``."""
    group = _GROUPS / "cpu" / f"ring-slow-{os.getpid()}"
    group.mkdir()
    share = max(0.15, 0.55 - 10 * seconds)
    (group / "cpu.cfs_quota_us").write_text(str(int(50_000 * share)))
    (group / "cpu.cfs_period_us").write_text("50000")
    (group / "tasks").write_text(str(os.getpid()))
    return nothing


def memory(_seconds: float) -> Callable[[], None]:
    """A control group that has less memory than the file this rank reads again and again."""
    size = 256 << 20
    file = tempfile.NamedTemporaryFile(dir=Path.cwd())  # noqa: SIM115 - it lives as long as the process
    for _ in range(size >> 20):
        file.write(os.urandom(1 << 20))
    file.flush()
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what is read again counts as the group's
    group = _GROUPS / "memory" / f"ring-slow-{os.getpid()}"
    group.mkdir()
    (group / "tasks").write_text(str(os.getpid()))
    (group / "memory.limit_in_bytes").write_text(str(48 << 20))  # what came before counts elsewhere
    pages = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    pages.madvise(mmap.MADV_RANDOM)

    def read() -> None:
        for _ in range(2000):
            pages[random.randrange(size)]

    return read


STEP = (asleep, compute, garbage, disk, threads, queued, throttled, memory)
FAULTS = (*(one.__name__ for one in STEP), "data", "samples", "none")
"""The names of `slow_ranks.CAUSES`."""


def train(fault: str, seed: int, seconds: float) -> None:
    """Train on this rank; the slow one has the fault."""
    draw = random.Random(seed)
    slow, delay = draw.randrange(2), draw.uniform(0.006, 0.04)
    ring.init()
    here = ring.rank() == slow
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = ring.prepare(model, optimizer)
    rows = int(ROWS * (1.5 + 40 * delay)) if here and fault == "samples" else ROWS
    inputs, targets = torch.randn(rows, WIDTH), torch.randint(10, (rows,))

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            if here and fault == "data":
                time.sleep(delay)
            yield inputs, targets

    step = next((one(delay) for one in STEP if here and one.__name__ == fault), nothing)
    began = time.monotonic()
    for number, (x, y) in enumerate(ring.track(batches())):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        step()
        loss.backward()
        optimizer.step()
        ring.log(loss=loss.item())
        if number % 10 == 9 and ring.allreduce(torch.tensor(time.monotonic() - began), op=ring.Max) > seconds:
            break


def judge(fault: str, seed: int, seconds: float) -> tuple[str, str]:
    """What ringrun says of a training: the cause, ``none``, or ``wrong rank``; and its sentence."""
    command = [str(Path(sys.executable).with_name("ringrun")), "-np", "2", sys.executable, __file__, "--rank"]
    done = subprocess.run(
        [*command, fault, str(seed), str(seconds)], capture_output=True, text=True, timeout=120, check=False
    )
    for group in [*_GROUPS.glob("cpu/ring-slow-*"), *_GROUPS.glob("memory/ring-slow-*")]:
        group.rmdir()
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    match = _SAID.search(done.stdout + done.stderr)
    if match is None:
        return "none", ""
    if fault != "none" and int(match[1]) != random.Random(seed).randrange(2):
        return "wrong rank", match[0]
    return next(name for name, (why, _) in CAUSES.items() if why == match[2]), match[0]


def main() -> None:
    """Print a line for each fault: how often it was named rightly, and what else was said."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--only", default=",".join(FAULTS))
    parser.add_argument("--rank", nargs=3, metavar=("FAULT", "SEED", "SECONDS"))
    options = parser.parse_args()
    if options.rank:
        return train(options.rank[0], int(options.rank[1]), float(options.rank[2]))
    said = {fault: Counter[str]() for fault in options.only.split(",")}
    for seed in range(options.seeds):
        for fault, counted in said.items():
            found, sentence = judge(fault, seed, options.seconds)
            counted[found] += 1
            if found != fault:
                print(f"  seed {seed}, {fault}: {found}: {sentence}", file=sys.stderr)
    for fault, counted in said.items():
        others = ", ".join(f"{name} {count}" for name, count in counted.items() if name != fault)
        named = sum(one[fault] for one in said.values())
        precision = f"{counted[fault] / named:.0%}" if named else "-"
        print(f"{fault:10} recall {counted[fault]}/{options.seeds}  precision {precision:>4}  {others}")
    return None


if __name__ == "__main__":
    main()
