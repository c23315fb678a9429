"""What the gate before programs of jax.distributed costs: a sum with and without it, in turn, in one run.

    RING_GATE=off ringrun -np 2 .jax/venv/bin/python benchmarks/jax_gate.py [--real-time]

Quartiles over calls on rank 0, in microseconds. With ``--real-time`` the ranks go before all other processes while they
are measured (needs root): on a busy machine each meeting of two ranks else waits for a turn, up to 4 ms on Linux.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any

import numpy as np

import jax
import ring_notebook.jax as ring
from ring_notebook.jax import all_devices, jax_private


def schedule(policy: int, priority: int) -> None:
    """Have all threads of this process scheduled so."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real-time", action="store_true")
    arguments = parser.parse_args()
    ring.init()
    ring.start_distributed()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))
    spec = jax.sharding.PartitionSpec
    begin = all_devices._gate_before
    jax_private.begin_programs_with(lambda program: None if "without" in program.name else begin(program))

    def summed(name: str) -> Any:
        def total(part: jax.Array) -> jax.Array:
            return jax.lax.psum(part, "ranks")

        total.__name__ = name
        return jax.jit(jax.shard_map(total, mesh=mesh, in_specs=spec("ranks"), out_specs=spec()))

    for count, calls in ((8, 40), (1 << 20, 8)):
        rows = jax.sharding.NamedSharding(mesh, spec("ranks"))
        array = jax.make_array_from_process_local_data(rows, np.ones(count, np.float32))
        ways = {name: summed(name) for name in ("without", "with")}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(10):
            if turn == 1 and arguments.real_time:
                schedule(os.SCHED_RR, 1)
            for name, way in ways.items():
                for _ in range(calls):
                    began = perf_counter()
                    jax.block_until_ready(way(array))
                    if turn:  # the first one compiles
                        times[name].append(perf_counter() - began)
        if arguments.real_time:
            schedule(os.SCHED_OTHER, 0)
        if ring.rank() == 0:
            for name, values in times.items():
                quartiles = " ".join(f"{1e6 * value:.0f}" for value in quantiles(values, n=4))
                print(f"{4 * count} B, {name} the gate: {quartiles}", flush=True)


if __name__ == "__main__":
    main()
