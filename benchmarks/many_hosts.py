"""Allreduce on 2 to 4,096 hosts, simulated over the core's plans, beside published algorithms; and what is measured.

    .venv/bin/python benchmarks/many_hosts.py [--hosts 2,64,4096] [--sizes 4,65536,104857600] [--jitter 0]
    sudo .venv/bin/python benchmarks/many_hosts.py --check [--rate 200mbit]
    .venv/bin/python benchmarks/many_hosts.py --form 512

The first sends no byte: it follows each message of the core's own plans (`core.ring_plan`, ...) over a link with
latency, bandwidth and jitter, the agreement on headers included, and prints time, messages and bytes. One rank is on
each host. NCCL's and MPI's algorithms take the same link: NCCL's ring, its double binary tree (Sanders, Speck and Traff
2009, with pieces of the best size), recursive doubling, and Rabenseifner's (Thakur, Rabenseifner and Gropp 2005). None
of these agrees on headers before.

The second measures two to four network namespaces over a link that tbf limits. It takes latency from 4 B on two of
them and predicts all others. tbf lets 256 KiB pass at once after a pause, so small tensors want a low rate.

The third has as many members form at a real rendezvous server over loopback.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ring_notebook.core.native import core
from ring_notebook.rank.rendezvous import Rendezvous
from ring_notebook.rank.rendezvous_server import SECRET, RendezvousServer

HOSTS = (2, 3, 4, 8, 12, 16, 64, 256, 512, 1024, 4096)
SIZES = (4, 65_536, 100 << 20)
MESSAGE = 256 << 10  # most bytes of a message in the ring
FRONT, RUN, BLOCK = 8, 16, 280  # bytes of an agreement: before a message, before a block, of a block


@dataclass(frozen=True)
class Network:
    """Seconds of a message on the way, of a host for each one that it sends and takes, and for each byte of each."""

    latency: float = 12e-6
    handling: float = 5e-6
    per_byte: float = 8e-10
    per_sum: float = 3e-10
    jitter: float = 0.0
    """Mean of the exponential delay of a message."""


class Fabric:
    """Hosts with clocks, and a wire out of each."""

    def __init__(self, hosts: int, network: Network) -> None:
        self.network, self.hosts = network, hosts
        self.now, self.wire_free = np.zeros(hosts), np.zeros(hosts)
        self.messages, self.bytes = 0, 0
        self._random = np.random.default_rng(hosts)

    def send(self, sender: np.ndarray, nbytes: np.ndarray | int, at: np.ndarray | None = None) -> np.ndarray:
        """When the messages that these hosts send at ``at`` (or now) arrive."""
        net = self.network
        nbytes = np.broadcast_to(nbytes, sender.shape)
        self.now[sender] = (self.now[sender] if at is None else np.maximum(self.now[sender], at)) + net.handling / 2
        left = np.maximum(self.now[sender], self.wire_free[sender]) + nbytes * net.per_byte
        self.wire_free[sender] = left
        self.messages += len(sender)
        self.bytes += int(nbytes.sum())
        delay = self._random.exponential(net.jitter, sender.shape) if net.jitter else 0.0
        return left + net.latency + delay

    def take(self, receiver: np.ndarray, arrival: np.ndarray, added: np.ndarray | int = 0) -> None:
        """These hosts wait for a message each, and add so many bytes."""
        net = self.network
        self.now[receiver] = np.maximum(self.now[receiver], arrival) + net.handling / 2 + added * net.per_sum


def agree(fabric: Fabric, payload: int) -> None:
    """The exchange of headers before an operation, with a payload that differs by host, or none."""
    hosts, everyone = fabric.hosts, np.arange(fabric.hosts)
    if core.agree_directly(hosts):
        arrivals = [fabric.send(everyone, BLOCK + payload) for _ in range(1, hosts)]
        for step, arrival in enumerate(arrivals, 1):
            fabric.take((everyone + step) % hosts, arrival)
        return
    plans = [core.dissemination_plan(hosts, host) for host in range(hosts)]
    for number in range(len(plans[0])):
        to = np.array([plan[number][0] for plan in plans])
        blocks = np.array([plan[number][2] for plan in plans])
        nbytes = FRONT + (blocks * (RUN + BLOCK + payload) if payload else RUN + BLOCK)
        fabric.take(to, fabric.send(everyone, nbytes))


def double(fabric: Fabric, nbytes: int) -> None:
    """Recursive doubling, in which exchanges of the same kind and number happen at once."""
    plans = [core.doubling_plan(fabric.hosts, host) for host in range(fabric.hosts)]

    def exchange(pairs: list[tuple[int, int]], added: int) -> None:
        if pairs:
            sender, receiver = np.array(pairs).T
            fabric.take(receiver, fabric.send(sender, nbytes), added)

    def pairs_of(kind: str, number: int) -> list[tuple[int, int]]:
        found = []
        for host, plan in enumerate(plans):
            peers = [peer for what, peer in plan if what == kind]
            found += [(host, peers[number])] if number < len(peers) else []
        return found

    exchange(pairs_of("give", 0), nbytes)
    for number in range(max(len(plan) for plan in plans)):
        exchange(pairs_of("both", number), nbytes)
    exchange(pairs_of("give result", 0), 0)


def ring(fabric: Fabric, nbytes: int) -> None:
    """Messages of a piece follow each other; each leaves when the one of the hop before has come."""
    hosts, everyone = fabric.hosts, np.arange(fabric.hosts)
    hops = core.ring_plan(hosts, 0)
    for host in {1 % hosts, hosts - 1}:  # the plan of each other host is this one, turned
        turned = [((send + host) % hosts, (receive + host) % hosts, adds) for send, receive, adds in hops]
        assert core.ring_plan(hosts, host) == turned
    count = max(1, nbytes // 4)
    sizes = np.array([4 * (end - begin) for begin, end in (core.chunk_range(count, hosts, i, 4) for i in range(hosts))])
    in_piece = max(1, math.ceil(int(sizes.max()) / MESSAGE))
    come: list[np.ndarray] = [np.zeros(hosts)] * in_piece
    for send, _, _ in hops:
        for number in range(in_piece):
            part = np.clip(sizes[(everyone + send) % hosts] - number * MESSAGE, 0, MESSAGE)
            sender = everyone[part > 0]
            arrival = np.zeros(hosts)
            arrival[(sender + 1) % hosts] = fabric.send(sender, part[sender], come[number][sender])
            come[number] = arrival
    fabric.take(everyone, np.max(come, axis=0))


def path_of(hosts: int, nbytes: int) -> str:
    """The path that the core takes for a sum of float32."""
    inline = core.goes_with_headers(hosts, nbytes)
    header = core.Header("allreduce", count=max(1, nbytes // 4), is_inline=inline)
    return core.choose([header] * hosts, hosts=hosts).name


def allreduce(hosts: int, nbytes: int, network: Network, path: str) -> Fabric:
    """Follow every message of one allreduce."""
    fabric = Fabric(hosts, network)
    agree(fabric, nbytes if path == "eager" else 0)
    if path != "eager":
        (double if path == "doubling" else ring)(fabric, nbytes)
    return fabric


def published(hosts: int, nbytes: int, net: Network) -> dict[str, float]:
    """Seconds of other libraries' algorithms, by their authors' formulas."""
    hop, wire, log = net.latency + net.handling, nbytes * net.per_byte, math.ceil(math.log2(hosts))
    fold = 0 if hosts & (hosts - 1) == 0 else 2 * (hop + wire)
    pieces = max(1.0, math.sqrt(2 * wire / (2 * log * hop)))  # of a tree's pipeline
    return {
        "NCCL ring": 2 * (hosts - 1) * (hop + wire / hosts),
        "NCCL trees": 2 * log * (hop + wire / pieces) + 2 * wire + pieces * net.handling,
        "MPI doubling": int(math.log2(hosts)) * (hop + wire + nbytes * net.per_sum) + fold,
        "Rabenseifner": 2 * int(math.log2(hosts)) * hop + 2 * (hosts - 1) / hosts * wire + fold,
    }


def text(seconds: float) -> str:
    """A time to three digits."""
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"


def size_text(nbytes: float) -> str:
    """Bytes to three digits."""
    for unit, step in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= step:
            return f"{nbytes / step:.3g} {unit}"
    return f"{nbytes:.3g} B"


def simulate(hosts: list[int], sizes: list[int], network: Network) -> Iterator[str]:
    """The lines of the table."""
    others = list(published(2, 4, network))
    yield f"| tensor | hosts | path | time | messages a host | bytes a host | {' | '.join(others)} |"
    yield "|---" * (6 + len(others)) + "|"
    for nbytes in sizes:
        for count in hosts:
            path = path_of(count, nbytes)
            fabric = allreduce(count, nbytes, network, path)
            cells = [size_text(nbytes), f"{count:,}", path, text(float(fabric.now.max()))]
            cells += [f"{fabric.messages / count:,.1f}", size_text(fabric.bytes / count)]
            cells += [text(one) for one in published(count, nbytes, network).values()]
            yield f"| {' | '.join(cells)} |"


_MEASURED = """\
import statistics, sys, time
import torch
import ring_notebook.torch as ring
ring.init()
for size in map(int, sys.argv[1].split(",")):
    tensor = ring.empty(size // 4, dtype=torch.float32).fill_(1)
    times = []
    until = time.monotonic() + float(sys.argv[2])
    while not times or len(times) < 12 or ring.broadcast_object(time.monotonic() < until):
        ring.barrier()
        begin = time.perf_counter()
        ring.allreduce_(tensor, op=ring.Max)
        times.append(time.perf_counter() - begin)
    slowest = max(ring.allgather_object(statistics.median(times)))
    if ring.rank() == 0:
        print("measured", size, slowest, flush=True)
"""


def check(rate: str, sizes: list[int], seconds: float) -> Iterator[str]:
    """Measured and simulated times on two to four namespaces."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from harness.two_hosts import missing, two_hosts

    if reason := missing():
        sys.exit(f"hosts cannot be made here: {reason}")
    number, unit = re.fullmatch(r"(\d+)([mg]bit)", rate).groups()
    per_byte = 8 / (int(number) * {"mbit": 1e6, "gbit": 1e9}[unit])
    network = None
    yield f"| hosts, {rate} | tensor | path | measured | simulated | simulated/measured |"
    yield "|---|---|---|---|---|---|"
    for count in (2, 3, 4):
        with two_hosts(rate, count) as hosts, tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "measured.py"
            script.write_text(_MEASURED)
            where = ",".join(f"{name}:1" for name in hosts.names)
            program = [str(script), ",".join(map(str, sizes)), str(seconds)]
            out = hosts.on_first(
                [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix", "-H", where, sys.executable, *program]
            )
        measured = {int(size): float(found) for size, found in re.findall(r"measured (\d+) (\S+)", out)}
        if network is None:
            # Latency and handling cannot be told apart on two hosts: split as in the default.
            each = measured[sizes[0]] - (BLOCK + sizes[0]) * per_byte
            default = Network()
            share = default.latency / (default.latency + default.handling)
            network = Network(latency=share * each, handling=(1 - share) * each, per_byte=per_byte)
        for size in sizes:
            path = path_of(count, size)
            guess = float(allreduce(count, size, network, path).now.max())
            ratio = guess / measured[size]
            row = [str(count), size_text(size), path, text(measured[size]), text(guess), f"{ratio:.2f}"]
            yield f"| {' | '.join(row)} |"


def form(members: int) -> str:
    """How long so many members take to form at one server: three gatherings, as `ring_notebook.core.place` has them."""
    card = {
        "host": "node-1234",
        "address": "10.12.34.56",
        "port": 41234,
        "settings": {f"RING_{i}": i for i in range(12)},
    }
    processes = 8
    context = multiprocessing.get_context("fork")
    begin_all = context.Barrier(processes + 1)
    with RendezvousServer(members, secret="x" * 32) as server:
        environment = {**os.environ, **server.variables, SECRET: "x" * 32}

        def main(first: int) -> None:
            found = []
            begin_all.wait(60)
            for rank in range(first, members, processes):
                env = {**environment, "RING_RANK": str(rank), "RING_SIZE": str(members)}
                found.append((rank, env))
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(len(found)) as pool:
                list(pool.map(lambda one: member(*one), found))

        def member(rank: int, env: dict[str, str]) -> None:
            rendezvous = Rendezvous.take(env)
            assert rendezvous is not None
            for step in range(3):
                values = rendezvous.gather({**card, "rank": rank, "step": step}, last=step == 2)
                assert [one["rank"] for one in values] == list(range(members))
            rendezvous.close()

        workers = [context.Process(target=main, args=(first,)) for first in range(processes)]
        for worker in workers:
            worker.start()
        begin_all.wait(60)
        begin = time.monotonic()
        for worker in workers:
            worker.join(300)
        seconds = time.monotonic() - begin
        failed = [worker.exitcode for worker in workers if worker.exitcode != 0]
        for worker in workers:
            if worker.is_alive():
                worker.kill()
    assert not failed, f"processes of members ended with {failed}"
    return f"{members} members formed in {seconds:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default=",".join(map(str, HOSTS)), help="numbers of hosts")
    parser.add_argument("--sizes", default="", help="bytes of a tensor")
    parser.add_argument("--jitter", type=float, default=0.0, help="mean delay of a message, us")
    parser.add_argument("--latency", type=float, default=12.0, help="of a message, us")
    parser.add_argument("--bandwidth", type=float, default=10.0, help="of a host, Gbit/s")
    parser.add_argument("--check", action="store_true", help="measure namespaces, and simulate them")
    parser.add_argument("--rate", default="200mbit", help="of their links, as tc writes it")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each size that is measured")
    parser.add_argument("--form", type=int, metavar="N", help="time the formation of N members")
    arguments = parser.parse_args()
    sizes = [int(one) for one in arguments.sizes.split(",") if one]
    if arguments.form:
        print(form(arguments.form))
    elif arguments.check:
        for line in check(arguments.rate, sizes or [4, 1 << 20, 4 << 20], arguments.seconds):
            print(line, flush=True)
    else:
        network = Network(arguments.latency / 1e6, per_byte=8e-9 / arguments.bandwidth, jitter=arguments.jitter / 1e6)
        for line in simulate([int(one) for one in arguments.hosts.split(",")], sizes or list(SIZES), network):
            print(line, flush=True)


if __name__ == "__main__":
    main()
