"""Whether the sentence about a slow rank names the right rank and the right cause.

    python benchmarks/slow_ranks.py [--seeds 20] [--first 0] [--seconds 6] [--only data,asleep] [--jobs 1]
    python benchmarks/slow_ranks.py --cells
    python benchmarks/slow_ranks.py --traceml VENV/bin/python

Trains on two ranks with `ringrun` and makes one of them slow in eleven ways, one at a time; each seed has another rank
and another severity. Then it trains without a fault; and on two hosts, network namespaces of this machine, with a slow
link in one direction and without. It compares what ringrun says at the end with what was done. Two of the faults need
root and control groups, and so do the hosts: there PYTHONPATH=tests is needed too. With ``--jobs`` so many trainings
run at a time, each on two cores of its own.

With ``--cells`` each training is a recorded cell of a notebook's cluster, and what its timeline says counts. What its
panel says is compared with that: where they differ, both causes stand there.

With ``--traceml`` the same training runs under TraceML instead, as DistributedDataParallel on Gloo, in an environment
with traceml-ai, torch and this package. Its verdicts name a rank and the input or the computing, and no further cause:
"data" and "compute" here, or "slow" where it names the rank alone.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import mmap
import os
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ring_notebook.torch as ring
from ring_notebook.analysis.slow_ranks_and_links import CAUSES

ROWS, WIDTH = 256, 1024
_SAID = re.compile(r"rank (\d) is (?:over )?[\d.]+x slower (.+?); the others wait", re.IGNORECASE)
_LINK_SAID = re.compile(r"[Tt]he link from the host of rank (\d) to that of rank \d carries .*")
_TRACEML_VERDICT = re.compile(r"Verdict: (\w*) ?STRAGGLER")
_TRACEML_RANK = re.compile(r"Why: R(\d)")
_GROUPS = Path("/sys/fs/cgroup")
_UNIFIED = (_GROUPS / "cgroup.controllers").exists()  # cgroup v2


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
    quota = int(50_000 * max(0.15, 0.55 - 10 * seconds))
    if _UNIFIED:
        limits = {"cpu.max": f"{quota} 50000"}
    else:
        limits = {"cpu.cfs_quota_us": str(quota), "cpu.cfs_period_us": "50000"}
    enter_group("cpu", limits)
    return nothing


def enter_group(controller: str, limits: dict[str, str]) -> None:
    """Move this process to a control group of its own with these limits."""
    group = (_GROUPS if _UNIFIED else _GROUPS / controller) / f"ring-slow-{os.getpid()}"
    if _UNIFIED:
        (_GROUPS / "cgroup.subtree_control").write_text(f"+{controller}")
    group.mkdir()
    (group / "cgroup.procs").write_text(str(os.getpid()))
    for name, value in limits.items():  # memory that came before counts elsewhere
        (group / name).write_text(value)


def memory(_seconds: float) -> Callable[[], None]:
    """A control group that has less memory than the file this rank reads again and again."""
    size = 256 << 20
    file = tempfile.NamedTemporaryFile(dir=Path.cwd())  # noqa: SIM115 - it lives as long as the process
    for _ in range(size >> 20):
        file.write(os.urandom(1 << 20))
    file.flush()
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what is read again counts as the group's
    enter_group("memory", {"memory.max" if _UNIFIED else "memory.limit_in_bytes": str(48 << 20)})
    pages = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    pages.madvise(mmap.MADV_RANDOM)

    def read() -> None:
        for _ in range(2000):
            pages[random.randrange(size)]

    return read


STEP = (asleep, compute, garbage, disk, threads, queued, throttled, memory)
HOSTS = ("link", "hosts")
"""On two hosts, with a link that is slow in one direction, and without a fault."""
ON_HOSTS = "ring-a:1,ring-b:1"
FAULTS = (*(one.__name__ for one in STEP), "backward", "data", "samples", "none", *HOSTS)
"""The names of `slow_ranks.CAUSES`; ``backward`` sleeps inside of backward."""


class Batches(torch.utils.data.IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same batch again and again, ``late`` seconds after it is asked for."""

    def __init__(self, rows: int, late: float) -> None:
        super().__init__()
        self._batch, self._late = (torch.randn(rows, WIDTH), torch.randint(10, (rows,))), late

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            time.sleep(self._late)
            yield self._batch


def train(fault: str, seed: int, seconds: float, traceml: Any) -> None:
    """Train on this rank; the slow one has the fault. ``traceml`` is that module, or None for ours."""
    draw = random.Random(seed)
    slow, delay = draw.randrange(2), draw.uniform(0.006, 0.04)
    if traceml is None:
        ring.init()
    else:
        traceml.init(mode="auto")
        dist.init_process_group("gloo")
    here = slow == (ring.rank() if traceml is None else dist.get_rank())
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10))
    if here and fault == "backward":
        model[1].register_full_backward_hook(lambda *_: time.sleep(delay))
    device = torch.device("cpu")
    rows = int(ROWS * (1.5 + 40 * delay)) if here and fault == "samples" else ROWS
    loader: Any = torch.utils.data.DataLoader(Batches(rows, delay if here and fault == "data" else 0), batch_size=None)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if traceml is None:
        model, optimizer = ring.prepare(model, optimizer)
        device = next(model.parameters()).device
        loader = ring.track(loader)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    step = next((one(delay) for one in STEP if here and one.__name__ == fault), nothing)
    began = time.monotonic()
    for number, (x, y) in enumerate(loader):
        with nullcontext() if traceml is None else traceml.trace_step(model):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            step()
            loss.backward()
            optimizer.step()
        if traceml is None:
            ring.log(loss=loss.item())
        if number % 10 == 9 and _longest(time.monotonic() - began, traceml) > seconds:
            break


def _longest(seconds: float, traceml: Any) -> float:
    """The largest of all ranks."""
    value = torch.tensor(seconds)
    if traceml is None:
        return float(ring.allreduce(value, op=ring.Max))
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def train_in_cell(fault: str, seed: int, seconds: float, hosts: str = "") -> None:
    """Train in a recorded cell of a cluster of its own, and print what its timeline and its panel say."""
    from ring_notebook.notebook.cluster.cluster import Cluster

    source = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nimport slow_ranks\n"
    with Cluster(2, hosts) as cluster:
        run = cluster.run(f"{source}slow_ranks.train({fault!r}, {seed}, {seconds}, None)", options={"timeline": True})
        run.wait()
        slow = run.log.view().slow
        print(run.timeline().why, slow.sentence if slow else "", sep="\n")


def judge(fault: str, seed: int, seconds: float, traceml: str, cores: str, cells: bool) -> tuple[str, str]:
    """What ringrun, a timeline or TraceML in this environment says of a training: the cause, or ``none``; its sentence.

    Before the cause stands ``wrong rank: `` where another rank is named.
    """
    seconds *= 2 if fault in HOSTS else 1  # their steps take longer
    what = ["--rank", fault, str(seed), str(seconds), *["--cells"] * cells]
    ringrun = [sys.executable, "-m", "ring_notebook.launch.cli", "-np", "2"]
    program = [sys.executable, __file__, *what]
    if fault in HOSTS:
        return judge_hosts(program if cells else [*ringrun, "-H", ON_HOSTS, *program], fault, seed)
    command = program if cells else [*ringrun, *program]
    with tempfile.TemporaryDirectory() as logs:
        if traceml:
            command = [str(Path(traceml).with_name("traceml")), "run", "--nproc-per-node", "2", "--logs-dir", logs]
            command += [__file__, "--args", *what, "--under-traceml"]
        bound = ["taskset", "-c", cores, *command] if cores else command
        done = subprocess.run(bound, capture_output=True, text=True, timeout=600, check=False)
    for group in [*_GROUPS.glob("*/ring-slow-*"), *_GROUPS.glob("ring-slow-*")]:
        with suppress(OSError):  # that of another job has a process
            group.rmdir()
    said = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(said)
    if traceml:
        kind, who = _TRACEML_VERDICT.search(said), _TRACEML_RANK.search(said)
        if kind is None or who is None:
            return "none", ""
        cause, rank = {"INPUT": "data", "COMPUTE": "compute"}.get(kind[1], "slow"), int(who[1])
        sentence = next(line for line in said.splitlines() if "Why:" in line)
    else:
        matches = [*_SAID.finditer(said)]
        if not matches:
            return "none", ""
        causes = [next(name for name, (why, _) in CAUSES.items() if why == match[2]) for match in matches]
        cause, rank, sentence = " and ".join(dict.fromkeys(causes)), int(matches[0][1]), matches[0][0]
    wrong = fault != "none" and rank != random.Random(seed).randrange(2)
    return f"{'wrong rank: ' * wrong}{cause}", sentence


def judge_hosts(command: list[str], fault: str, seed: int) -> tuple[str, str]:
    """The same for a training on two hosts, of which one sends at 40 to 250 Mbit/s where the link is slow."""
    two_hosts = importlib.import_module("harness.two_hosts").two_hosts
    draw = random.Random(seed)
    slow, rate = draw.randrange(2), draw.uniform(40, 250)
    with two_hosts("1gbit") as hosts, hosts.limited(slow, f"{rate:.0f}mbit") if fault == "link" else nullcontext():
        said = hosts.on_first(command, 600.0)
    if match := _LINK_SAID.search(said):
        return f"{'wrong rank: ' * (fault == 'hosts' or int(match[1]) != slow)}link", match[0]
    match = _SAID.search(said)
    return ("none", "") if match is None else (f"wrong rank: {match[2]}", match[0])


def main() -> None:
    """Print a line for each fault: how often its rank and cause were named, and what else was said."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--only", default=",".join(FAULTS))
    parser.add_argument("--jobs", type=int, default=0, metavar="N")
    parser.add_argument("--cells", action="store_true")
    parser.add_argument("--traceml", default="", metavar="PYTHON")
    parser.add_argument("--rank", nargs=3, metavar=("FAULT", "SEED", "SECONDS"))
    parser.add_argument("--under-traceml", action="store_true")
    options = parser.parse_args()
    if options.rank and options.cells:
        fault, seed, seconds = options.rank
        return train_in_cell(fault, int(seed), float(seconds), ON_HOSTS if fault in HOSTS else "")
    if options.rank:
        traceml = importlib.import_module("traceml_ai") if options.under_traceml else None
        return train(options.rank[0], int(options.rank[1]), float(options.rank[2]), traceml)
    said = {fault: Counter[str]() for fault in options.only.split(",")}
    cores = sorted(os.sched_getaffinity(0))
    pairs = queue.SimpleQueue[str]()
    for job in range(max(1, options.jobs)):
        pairs.put(f"{cores[2 * job]},{cores[2 * job + 1]}" if options.jobs else "")

    def run(fault: str, seed: int) -> None:
        pair = pairs.get()
        try:
            found, sentence = judge(fault, seed, options.seconds, options.traceml, pair, options.cells)
        finally:
            pairs.put(pair)
        said[fault][found] += 1
        print(f"  seed {seed}, {fault}: {found}: {sentence}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        seeds = range(options.first, options.first + options.seeds)
        running = [pool.submit(run, fault, seed) for seed in seeds for fault in said]
        try:
            for ended in as_completed(running):
                ended.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for fault, counted in said.items():
        cause = {"backward": "asleep", "hosts": "none"}.get(fault, fault)
        named = sum(one[cause] for one in said.values())
        right = sum(one[cause] for of, one in said.items() if cause in (of, "asleep" if of == "backward" else of))
        precision = f"{right / named:.0%}" if named else "-"
        rank = sum(count for name, count in counted.items() if name != "none" and not name.startswith("wrong"))
        others = ", ".join(f"{name} {count}" for name, count in counted.items() if name != cause)
        print(
            f"{fault:10} rank {rank}/{options.seeds}  cause {counted[cause]}/{options.seeds}  "
            f"precision {precision:>4}  {others}"
        )
    return None


if __name__ == "__main__":
    main()
