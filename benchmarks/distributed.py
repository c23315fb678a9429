"""torch.distributed on backend "ring" beside Gloo (and MPI's backend, where torch has it): operations, then steps.

    ringrun -np 2 python benchmarks/distributed.py [--sizes 4,1048576] [--seconds 1.0] [--steps 20]

Each candidate is called in turn, over and over, so that all of them see the same noise, and as often as fits a turn of
a millisecond; times are medians of the slowest rank. ``in ring memory`` takes tensors of `ring.empty`. A step is
forward, backward and SGD of a model of 21 million parameters in wide layers, on one thread a rank; ``alone`` does not
communicate, ``exchanging nothing`` is DistributedDataParallel with a hook that returns each bucket as it is. FSDP2
shards each layer; ``in ring memory`` has its buffers there (``set_allocate_memory_from_process_group_for_comm``).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ring_notebook.torch as ring

TURN = 1e-3
SIZES = [4, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
Call = Callable[[], object]


def operations(group: Any, count: int, make: Callable[[int], Tensor]) -> dict[str, Call]:
    """Calls on ``group`` of tensors of ``count`` elements, by name; one of all ranks' parts has so many too."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part = max(1, count // size)
    whole, own, other = make(part * size), make(part), make(part * size)
    sent, got = make(count), make(count)
    parts = list(other.chunk(size))

    def exchange() -> None:
        first, second = (dist.send, dist.recv) if rank % 2 == 0 else (dist.recv, dist.send)
        peer = rank ^ 1
        if peer < size:
            first(sent if rank % 2 == 0 else got, peer, group=group)
            second(got if rank % 2 == 0 else sent, peer, group=group)

    return {
        "all_reduce": lambda: dist.all_reduce(sent, group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, own, group=group),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(own, whole, group=group),
        "broadcast": lambda: dist.broadcast(sent, 0, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(other, whole, group=group),
        "gather": lambda: dist.gather(own, parts if rank == 0 else None, 0, group=group),
        "scatter": lambda: dist.scatter(own, parts if rank == 0 else None, 0, group=group),
        "send and recv, there and back": exchange,
    }


def wide() -> nn.Sequential:
    """21 million parameters, as three wide layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 64))


def step_of(model: nn.Module) -> Call:
    """One training step of ``model``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(32, 1024), torch.randint(64, (32,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def completed(tensor: Tensor) -> torch.futures.Future[Tensor]:
    """What a hook of DistributedDataParallel returns that has done with a bucket."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def sharded(group: Any, in_ring: bool) -> nn.Module:
    """The model under FSDP2."""
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    model = wide()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if in_ring:
        for module in model.modules():
            if hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
                module.set_allocate_memory_from_process_group_for_comm(True)
    return model


def steps(groups: dict[str, Any]) -> dict[str, dict[str, Call]]:
    """The steps to compare, by kind and candidate."""
    ddp: dict[str, Call] = {"alone": step_of(wide())}
    idle = DistributedDataParallel(wide(), process_group=groups["ring"], gradient_as_bucket_view=True)
    idle.register_comm_hook(None, lambda _, bucket: completed(bucket.buffer()))
    ddp["exchanging nothing"] = step_of(idle)
    fsdp: dict[str, Call] = {"alone": ddp["alone"]}
    for name, group in groups.items():
        ddp[name] = step_of(DistributedDataParallel(wide(), process_group=group, gradient_as_bucket_view=True))
        fsdp[name] = step_of(sharded(group, False))
    fsdp["ring, in ring memory"] = step_of(sharded(groups["ring"], True))
    return {"step, DistributedDataParallel": ddp, "step, FSDP2": fsdp}


def measure(calls: dict[str, Call], seconds: float, least: int) -> dict[str, float]:
    """Median milliseconds of each call, of the slowest rank, called in turn for about so long in all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeats: dict[str, int] = {}
    for name, call in calls.items():
        call()
        dist.barrier()
        started = perf_counter()
        call()
        elapsed = torch.tensor([perf_counter() - started], dtype=torch.float64)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        repeats[name] = max(1, int(TURN / elapsed.item()))
    begin, round_of = perf_counter(), 0
    while True:
        for name, call in calls.items():
            dist.barrier()
            started = perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append((perf_counter() - started) / repeats[name])
        round_of += 1
        more = torch.tensor([float(round_of < least or perf_counter() - begin < seconds)])
        dist.all_reduce(more, op=dist.ReduceOp.MAX)
        if not more.item():
            break
    medians = torch.tensor([median(times[name]) * 1e3 for name in calls], dtype=torch.float64)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return dict(zip(calls, medians.tolist(), strict=True))


def show(*cells: str) -> None:
    """A row of the table, from rank 0."""
    if dist.get_rank() == 0:
        sys.stdout.write("| " + " | ".join(cells) + " |\n")
        sys.stdout.flush()


def text(milliseconds: float | None) -> str:
    """A time, in the unit that suits it."""
    if milliseconds is None:
        return ""
    return f"{milliseconds * 1e3:.1f} µs" if milliseconds < 1 else f"{milliseconds:.2f} ms"


def main() -> None:
    """Print the table of operations, then that of steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=SIZES)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row")
    parser.add_argument("--steps", type=int, default=20, help="of each candidate, at least; 0 for none")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ring.init()
    groups = {"ring": ring.process_group(), "gloo": dist.new_group(backend="gloo")}
    if dist.is_mpi_available():
        groups["mpi"] = dist.new_group(backend="mpi")
    others = [name for name in groups if name != "ring"]
    columns = ["ring", "ring, in ring memory", *others]
    show("operation", "bytes", *columns, "gloo/ring")
    show(*["---"] * (3 + len(columns)))
    for size in options.sizes:
        count = max(1, size // 4)
        sets = {name: operations(group, count, torch.zeros) for name, group in groups.items()}
        sets["ring, in ring memory"] = operations(groups["ring"], count, lambda n: ring.empty(n).zero_())
        for operation in sets["ring"]:
            times = measure({name: calls[operation] for name, calls in sets.items()}, options.seconds, 5)
            ratio = f"{times['gloo'] / times['ring']:.1f}x"
            show(operation, f"{size:,}", *(text(times[name]) for name in columns), ratio)
    if options.steps:
        for kind, calls in steps(groups).items():
            times = measure(calls, 0, options.steps)
            without = ", ".join(f"{name} {text(times[name])}" for name in times if name not in columns)
            show(kind, without, *(text(times.get(name)) for name in columns),
                 f"{times['gloo'] / times['ring']:.1f}x")  # fmt: skip
    dist.destroy_process_group()
    ring.shutdown()


if __name__ == "__main__":
    main()
