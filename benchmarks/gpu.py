"""Allreduce and training steps on GPUs, beside torch.distributed and DistributedDataParallel.

    ringrun -np 2 python benchmarks/gpu.py [--sizes 4,1048576] [--seconds 1.0] [--steps 30]

One rank for each GPU, and torch.distributed on NCCL. Where ranks share a GPU it is on Gloo, unless NCCL may connect
them (NCCL_MULTI_RANK_GPU_ENABLE=1). Each candidate is called in turn, over and over, so that all of them see the same
noise; times are medians of the slowest rank. An allreduce is timed as a row of ten that the host enqueues before it
waits for its GPU. A step is forward, backward and SGD: of a transformer of 13 million parameters, and of a
convolutional network of 6 million. ``alone`` does not communicate. Without a GPU nothing is measured; `--pretend`
then runs our own candidates on the tests' pretended device, which shows that this script works and says nothing of
speed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ring_notebook.torch as ring
from ring_notebook.core import world
from ring_notebook.machine.gpus import gpus, may_share_by_nccl

SIZES = [4 << 2 * power for power in range(14)]  # to 256 MiB
IN_A_ROW = 10
Call = Callable[[], object]


def pretended_device() -> torch.device:
    """The device of the tests, over their fake driver and fake NCCL."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from harness.devices.cuda_stand_in import CudaStandIn
    from harness.devices.pretended_gpu import NAME, PretendedKind, pretend
    from native.fakes.device import CUDA, environment
    from ring_notebook.config import config
    from ring_notebook.torch.devices import register_device

    os.environ.update(environment())
    config.cache_clear()
    pretend(lambda: CudaStandIn(CUDA()))
    register_device(NAME, PretendedKind())
    return torch.device(NAME, 0)


def reductions(device: torch.device, count: int) -> dict[str, Call]:
    """Rows of allreduces of ``count`` float32, in place, by candidate."""
    own = torch.zeros(count, device=device)

    def ours() -> None:
        for _ in range(IN_A_ROW):
            ring.allreduce_(own, op=ring.Sum)

    def theirs() -> None:
        for _ in range(IN_A_ROW):
            dist.all_reduce(own)

    return {"ring": ours} | ({"torch": theirs} if dist.is_initialized() else {})


class Transformer(nn.Module):
    """Four layers of attention and MLP over a sequence, in operations that any device has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "mlp": nn.Sequential(
                        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
                    ),
                }
            )
            for _ in range(4)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm"](x)).chunk(3, dim=-1)
            x = x + layer["out"](torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, dim=-1) @ v)
            x = x + layer["mlp"](x)
        return self.head(x.mean(1))


def convolutional(width: int) -> nn.Sequential:
    """Convolutions with batch norm, and a linear head."""
    layers: list[nn.Module] = []
    for before, after in ((3, width), (width, 2 * width), (2 * width, 4 * width), (4 * width, 8 * width)):
        layers += [nn.Conv2d(before, after, 3, padding=1, stride=2), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


def step_of(make: Callable[[], nn.Module], x: torch.Tensor, way: str) -> Call:
    """One training step, whose gradients go the way that is named."""
    torch.manual_seed(0)
    model = make().to(x.device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    if way == "ring":
        optimizer = ring.DistributedOptimizer(optimizer, model.named_parameters())
    elif way == "DDP":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def measure(calls: dict[str, Call], finish: Call, seconds: float, least: int) -> dict[str, float]:
    """Median seconds of each call, of the slowest rank, called in turn for about so long in all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    begin, rounds, more = perf_counter(), 0, True
    while more:
        for name, call in calls.items():
            finish()
            ring.barrier()
            started = perf_counter()
            call()
            finish()
            times[name].append(perf_counter() - started)
        rounds += 1
        more = any(ring.allgather_object(rounds < least or perf_counter() - begin < seconds))
    slowest = ring.allgather_object([median(times[name]) for name in calls])
    return {name: max(rank[number] for rank in slowest) for number, name in enumerate(calls)}


def show(*cells: str) -> None:
    """A row of the table, from rank 0."""
    if ring.rank() == 0:
        sys.stdout.write("| " + " | ".join(cells) + " |\n")
        sys.stdout.flush()


def text(seconds: float | None) -> str:
    """A time, in the unit that suits it."""
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def main() -> None:
    """Print the table of allreduces, then that of steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=SIZES)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size")
    parser.add_argument("--steps", type=int, default=30, help="of each candidate; 0 for none")
    parser.add_argument("--pretend", action="store_true", help="where there is no GPU, try the script itself")
    options = parser.parse_args()
    real = bool(gpus())
    if not real and not options.pretend:
        sys.stdout.write("NOT MEASURED: this machine has no GPU; --pretend tries the script itself\n")
        return
    device, other = torch.device("cuda") if real else pretended_device(), "nothing"
    ring.init()
    if real:
        torch.cuda.set_device(ring.local_rank() % torch.cuda.device_count())
        alone = ring.local_size() <= torch.cuda.device_count()
        dist.init_process_group(other := "nccl" if alone or may_share_by_nccl() else "gloo")
    finish: Call = torch.cuda.synchronize if real else getattr(torch, device.type).synchronize
    show("", "bytes", "alone", "ring", f"torch.distributed and DDP on {other}", "ratio")
    show(*["---"] * 6)

    def row(what: str, size: str, times: dict[str, float], each: int) -> None:
        other = times.get("torch", times.get("DDP"))
        ratio = "" if other is None else f"{other / times['ring']:.2f}x"
        cells = [None if time is None else time / each for time in (times.get("alone"), times["ring"], other)]
        show(what, size, *map(text, cells), ratio)

    for size in options.sizes:
        calls = reductions(device, max(1, size // 4))
        row("allreduce", f"{size:,}", measure(calls, finish, options.seconds, 5), IN_A_ROW)
    width, images = (512, 128) if real else (8, 8)
    kinds: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
        "step, transformer": (lambda: Transformer(width), torch.randn(8, 128 if real else 4, width)),
        "step, convolutional": (lambda: convolutional(width // 4), torch.randn(32, 3, images, images)),
    }
    for what, (make, x) in kinds.items() if options.steps else ():
        ways = ["alone", "ring", *(["DDP"] if real else [])]
        calls = {way: step_of(make, x.to(device), way) for way in ways}
        row(what, "", measure(calls, finish, 0, options.steps), 1)
    if ring.rank() == 0:
        where = f"{torch.cuda.get_device_name()}, by" if real else "A pretended device, whose times say nothing, by"
        sys.stdout.write(f"\n{where} {' '.join(world.current().communicator.device_transport())}\n")
    if real:
        dist.destroy_process_group()
    ring.shutdown()


if __name__ == "__main__":
    main()
