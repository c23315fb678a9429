"""The time of an allreduce of JAX's arrays: ours, jax.distributed on Gloo, mpi4jax where installed, and mpi4py.

    ringrun -np 2 .jax/venv/bin/python benchmarks/jax_allreduce.py [--sizes 4,1024,...] [--seconds 2]

Sizes from 4 B to 64 MiB of float32. "ours, jit" is an allreduce within a compiled function, "ours" one by itself.
"gloo, jit" is a ``psum`` over the devices of all processes, by jax.distributed with
``jax_cpu_collectives_implementation=gloo``. "mpi4jax, jit" is the same function with its allreduce; "mpi4py" an
Allreduce between numpy arrays, without JAX. All take turns; the figure is the median on the slowest rank.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
import ring_notebook.jax as ring

SIZES = [4, 64, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def start_gloo() -> Any:
    """A mesh with one CPU device of each rank, over jax.distributed."""
    port = 0
    if ring.rank() == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{ring.broadcast_object(port)}", ring.size(), ring.rank())
    return jax.sharding.Mesh(np.array(jax.devices()), "ranks")


def calls(count: int, mesh: Any) -> dict[str, Callable[[], Any]]:
    """One allreduce of ``count`` floats for each variant, which is over when it returns."""
    own = jnp.full(count, ring.rank() + 1.0, jnp.float32)
    ours = jax.jit(lambda x: ring.allreduce(x, op=ring.Sum))
    found: dict[str, Callable[[], Any]] = {
        "ours, jit": lambda: ours(own).block_until_ready(),
        "ours": lambda: ring.allreduce(own, op=ring.Sum).block_until_ready(),
    }
    spec = jax.sharding.PartitionSpec("ranks")
    whole = jax.make_array_from_single_device_arrays(
        (count * ring.size(),), jax.sharding.NamedSharding(mesh, spec), [own]
    )
    shard_map = getattr(jax, "shard_map", None)
    if shard_map is None:
        from jax.experimental.shard_map import shard_map
    summed = jax.jit(
        shard_map(lambda x: jax.lax.psum(x, "ranks"), mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec())
    )
    found["gloo, jit"] = lambda: summed(whole).block_until_ready()
    if importlib.util.find_spec("mpi4jax"):
        import mpi4jax
        from mpi4py import MPI

        def reduced(x: Any) -> Any:
            result = mpi4jax.allreduce(x, op=MPI.SUM)
            return result[0] if isinstance(result, tuple) else result  # with a token in older versions

        compiled = jax.jit(reduced)
        found["mpi4jax, jit"] = lambda: compiled(own).block_until_ready()
    if importlib.util.find_spec("mpi4py"):
        from mpi4py import MPI

        array, result = np.array(own), np.empty(count, np.float32)
        found["mpi4py"] = lambda: MPI.COMM_WORLD.Allreduce(array, result)
    return found


def measure(variants: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Median time of each call in seconds, on the slowest rank, interleaved."""
    for call in variants.values():
        for _ in range(3):
            call()
    times: dict[str, list[float]] = {name: [] for name in variants}
    began = perf_counter()
    while True:
        for name, call in variants.items():
            for _ in range(5):
                ring.barrier()
                start = perf_counter()
                call()
                times[name].append(perf_counter() - start)
        if ring.broadcast_object(perf_counter() - began > seconds):
            break
    own = [median(values) for values in times.values()]
    slowest = [max(column) for column in zip(*ring.allgather_object(own), strict=True)]
    return dict(zip(times, slowest, strict=True))


def shown(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each size")
    arguments = parser.parse_args()
    ring.init()
    mesh = start_gloo()
    for number, size in enumerate(map(int, arguments.sizes.split(","))):
        result = measure(calls(max(size // 4, 1), mesh), arguments.seconds)
        if ring.rank() == 0:
            others = [name for name in result if not name.startswith("ours")]
            if number == 0:
                print(f"{ring.size()} ranks, JAX {jax.__version__}\n")
                heads = [*result, *(f"{name} / ours, jit" for name in others)]
                print("| bytes | " + " | ".join(heads) + " |")
                print("|---" * (len(heads) + 1) + "|")
            cells = [shown(time) for time in result.values()]
            cells += [f"{result[name] / result['ours, jit']:.1f}x" for name in others]
            print(f"| {size} | " + " | ".join(cells) + " |", flush=True)
    ring.barrier()
    os._exit(0)  # jax.distributed ends when all have


if __name__ == "__main__":
    main()
