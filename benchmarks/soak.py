"""Random operations on random groups while ranks abort, raise, are interrupted, leave and disagree: nothing may hang.

    ringrun -np 4 python benchmarks/soak.py [--operations 1000000] [--seed 1]

An *epoch* is a random plan that all ranks draw from the seed: groups, and operations on them, blocking and queued, once
or many times in a row, on ring memory and ordinary memory, with pauses that differ by rank. In about every other epoch
one rank does something else at a random place. Every result is checked. Ten times, with no epoch open, each rank looks
at what it holds. At the end all ranks do a clean collective, print what has been done and held, and fail when
descriptors, threads or memory have grown.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ring_notebook.core import world
from ring_notebook.core.buffers import Buffer, from_memoryview
from ring_notebook.core.communicator import Communicator
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch, CollectiveTimeout

Array = npt.NDArray[np.float32]

KINDS = ("allreduce", "allreduce", "fused", "reducescatter", "allgather", "broadcast", "alltoall", "barrier")
COUNTS = (0, 1, 700, 4096, 5003, 70_001)
TROUBLES = ("abort", "raise", "interrupt", "leave", "lonely", "mismatch")  # an epoch lives on after a mismatch
EXPECTED = (CollectiveAborted, CollectiveMismatch, CollectiveTimeout, KeyboardInterrupt, ZeroDivisionError)
ACTIONS = 40  # in an epoch
TIMES = (1, 1, 1, 1, 20, 100)  # that a blocking operation is carried out in a row
WARM = 40  # epochs until a process holds what it needs
# What may come in addition: the heap levels off, and an epoch moves more. Ring memory keeps a reserve of freed pages.
SLACK = {"heap, MiB": 32, "pages of ring memory, MiB": 64}


@dataclass(frozen=True)
class Action:
    """An operation of a plan, ``times`` in a row. ``count`` is per rank of the group for reducescatter and alltoall."""

    group: int
    kind: str
    count: int
    root: int
    queued: bool
    times: int


@dataclass(frozen=True)
class Plan:
    """An epoch, the same on all ranks."""

    groups: list[list[int]]
    actions: list[Action]
    trouble: str
    culprit: int
    at: int

    def operations(self) -> int:
        """How many collectives come to their end, at least."""
        whole = self.trouble in ("", "mismatch")
        return sum(action.times for action in (self.actions if whole else self.actions[: self.at]))


def draw(seed: int, epoch: int, size: int) -> Plan:
    """The plan of an epoch."""
    dice = random.Random(f"{seed} {epoch}")
    groups = [list(range(size))]
    groups += [dice.sample(range(size), dice.randint(1, size)) for _ in range(dice.randint(0, 3))]
    actions = []
    for _ in range(ACTIONS):
        group = dice.randrange(len(groups))
        root = dice.randrange(len(groups[group]))
        queued = dice.random() < 0.5
        times = 1 if queued else dice.choice(TIMES)
        actions.append(Action(group, dice.choice(KINDS), dice.choice(COUNTS), root, queued, times))
    trouble = dice.choice(TROUBLES) if dice.random() < 0.5 else ""
    return Plan(groups, actions, trouble, dice.randrange(size), dice.randrange(ACTIONS))


def values(rank: int, index: int, count: int) -> Array:
    """What a rank brings to the action of that index. Sums over a few ranks are exact."""
    return ((np.arange(count) + rank * 5 + index * 3) % 17).astype(np.float32)


class Rank:
    """Carries plans out, checks results, and causes trouble when it is its turn."""

    def __init__(self, seed: int) -> None:
        topology = world.prepare_host().topology
        self.rank, self.size = topology.rank, topology.size
        self.seed = seed
        self.dice = random.Random(f"{seed} rank {self.rank}")
        self.done: Counter[str] = Counter()
        self._armed = False
        signal.signal(signal.SIGINT, self._on_interrupt)

    def _on_interrupt(self, *_: object) -> None:
        if self._armed:
            raise KeyboardInterrupt

    def epoch(self, number: int) -> None:
        """One epoch. Raises only for what should not happen."""
        plan = draw(self.seed, number, self.size)
        try:
            self._armed = True
            try:
                self._carry_out(plan, world.open_run("soak", number, range(self.size)).communicator)
                ended = "clean"
            finally:
                self._armed = False
        except EXPECTED as error:
            if not plan.trouble:
                raise AssertionError(f"epoch {number} had no trouble in its plan") from error
            ended = type(error).__name__
            world.abort(f"rank {self.rank} saw {ended}")  # as the runner of a cell does
        self.done[ended] += 1
        world.close()

    def _carry_out(self, plan: Plan, everybody: Communicator) -> None:
        groups = [everybody, *(everybody.group(ranks) for ranks in plan.groups[1:])]
        checks: list[Callable[[], None]] = []
        for index, action in enumerate(plan.actions):
            if plan.trouble == "mismatch" and plan.at == index:
                self._disagree(everybody, is_culprit=plan.culprit == self.rank)
            elif plan.trouble and plan.at == index:
                if plan.culprit == self.rank:
                    if self._cause(plan.trouble, everybody):
                        return
                elif plan.trouble == "interrupt":
                    time.sleep(0.03)  # so that there is something to interrupt
            group = groups[action.group]
            if group is None:
                continue
            if self.dice.random() < 0.1:
                time.sleep(self.dice.random() * 0.002)
            checks.append(self._act(group, action, index))
            while checks and (not action.queued or self.dice.random() < 0.2):
                checks.pop(0)()
        for check in checks:
            check()

    def _cause(self, trouble: str, everybody: Communicator) -> bool:
        """Do what the plan's trouble is; whether this rank's part in the epoch is over."""
        if trouble == "abort":
            everybody.abort("on purpose")
        elif trouble == "raise":
            raise ZeroDivisionError("on purpose")
        elif trouble == "interrupt":
            interrupt = threading.Timer(self.dice.random() * 0.02, os.kill, (os.getpid(), signal.SIGINT))
            interrupt.start()
            try:
                with contextlib.suppress(CollectiveTimeout):
                    everybody.barrier(blocking=False).wait(10.0)
            finally:
                interrupt.join()  # or it would come in the next epoch
            raise KeyboardInterrupt  # the others came first
        elif trouble == "lonely":
            everybody.barrier(name="nobody else does this", blocking=False).wait(0.3)
        return trouble != "abort"

    def _disagree(self, everybody: Communicator, *, is_culprit: bool) -> None:
        """One rank sends another shape; every rank must be told."""
        tensor = from_memoryview(np.ones(3 + is_culprit, np.float32))
        try:
            everybody.allreduce([tensor], [tensor])
        except CollectiveMismatch:
            self.done["mismatches"] += 1
        else:
            raise AssertionError(f"rank {self.rank} was not told of a mismatch")

    def _tensor(self, group: Communicator, content: Array) -> tuple[Array, Buffer]:
        if self.dice.random() < 0.5:
            placed: Array = np.ndarray(content.shape, np.float32, buffer=group.empty(content.nbytes))
            placed[...] = content
            content = placed
        return content, from_memoryview(content)

    def _act(self, group: Communicator, action: Action, index: int) -> Callable[[], None]:
        """Start an operation; what is returned waits for it and checks its result."""
        self.done["operations"] += action.times
        kind, count, size, ranks = action.kind, action.count, group.size, group.ranks
        whole = count * size if kind in ("reducescatter", "alltoall") else count
        own = count * group.rank // size if kind == "allgather" else whole
        brought = values(self.rank, index, own)
        source, sent = self._tensor(group, brought)
        target, received = self._tensor(group, brought * 0)
        part = slice(count * group.rank, count * (group.rank + 1))

        wanted: Array = np.stack([values(rank, index, whole) for rank in ranks]).sum(axis=0)
        if kind == "allreduce":
            start = partial(group.allreduce, [sent], [received])
        elif kind == "fused":
            cut = count // 3
            inputs, outputs = ([from_memoryview(all_[:cut]), from_memoryview(all_[cut:])] for all_ in (source, target))
            start = partial(group.allreduce, inputs, outputs)
        elif kind == "reducescatter":
            start, wanted = partial(group.reducescatter, sent, received), wanted[part]
        elif kind == "broadcast":
            start = partial(group.broadcast, sent, received, action.root)
            wanted = values(ranks[action.root], index, count)
        elif kind == "allgather":
            start = partial(group.allgather, sent)
            wanted = np.concatenate([values(rank, index, count * i // size) for i, rank in enumerate(ranks)])
        elif kind == "alltoall":
            start = partial(group.alltoall, [sent], [count] * size)
            wanted = np.concatenate([values(rank, index, whole)[part] for rank in ranks])
        else:
            start, wanted = group.barrier, target
        for _ in range(action.times - 1):
            start(blocking=True)
        work = start(blocking=not action.queued)

        def check() -> None:
            work.wait()
            produces = kind in ("allgather", "alltoall")
            got = np.frombuffer(bytes(work.output()), np.float32) if produces else target[: len(wanted)]
            assert np.array_equal(got, wanted), f"{action} on {ranks}: wrong result"
            assert np.array_equal(source, brought), f"{action} on {ranks}: input changed"

        return check


def usage() -> dict[str, int]:
    """What this process holds, when no epoch is open."""
    ring_memory = world.prepare_host().ring_memory
    deadline = time.monotonic() + 5
    while True:
        gc.collect()
        ring_memory.allocate(1)  # takes back what the other ranks have let go of
        if ring_memory.allocated == 0 or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    descriptors = Path("/proc/self/fd")
    rings = {one.stat().st_ino: one.stat().st_blocks for one in descriptors.iterdir() if _is_ring(one)}
    return {
        "ring memory, bytes": ring_memory.allocated,
        "pages of ring memory, MiB": sum(rings.values()) * 512 >> 20,
        "descriptors": len(list(descriptors.iterdir())),
        "threads": int(status["Threads"]),
        "heap, MiB": int(status["RssAnon"].split()[0]) >> 10,
    }


def _is_ring(descriptor: Path) -> bool:
    try:
        return os.readlink(descriptor).startswith("/memfd:ring ")
    except FileNotFoundError:  # of the listing itself
        return False


def main() -> None:
    """Run until the plans hold as many operations as were asked for, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rank = Rank(options.seed)
    if rank.size < 2:
        parser.error("one rank cannot be interrupted while it waits: ringrun -np 4 python benchmarks/soak.py")
    begun = time.monotonic()
    looks: list[dict[str, int]] = []
    number = collectives = 0
    while collectives < options.operations or number <= WARM:
        number += 1
        rank.epoch(number)
        collectives += draw(options.seed, number, rank.size).operations()
        if number == WARM or (looks and collectives >= options.operations * len(looks) / 10):
            looks.append(usage())
    looks.append(usage())
    last = world.open_run("soak", 1 << 40, range(rank.size)).communicator
    ones = from_memoryview(np.ones(100_000, np.float32))
    last.allreduce([ones], [ones])
    assert set(ones.owner.tolist()) == {float(rank.size)}
    world.close()
    print(f"rank {rank.rank}: {dict(rank.done)} in {time.monotonic() - begun:.0f} s", flush=True)
    print(f"rank {rank.rank}: {collectives} collectives in {number} epochs; held {_history(looks)}", flush=True)
    grown = {name: looks[-1][name] - looks[0][name] for name in looks[0]}
    if any(more > SLACK.get(name, 0) for name, more in grown.items()):
        sys.exit(f"rank {rank.rank}: something has grown: {grown}")


def _history(looks: list[dict[str, int]]) -> dict[str, str]:
    """Each kind as it was at the first look, at most, and at the last."""
    return {
        name: f"{value} first, {max(look[name] for look in looks)} most, {looks[-1][name]} last"
        for name, value in looks[0].items()
    }


if __name__ == "__main__":
    main()
