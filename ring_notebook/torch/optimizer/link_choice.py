"""Compression.auto: chooses a compression for each bucket by measuring the link between hosts.

At the third reduction of a plan the ranks measure how long an average takes uncompressed, as bfloat16 and as bytes, and
how long backward continues after each bucket. A bucket takes the first of the three that ends before the next bucket is
ready, or the pass has ended, or by at most `_NOTICED` of a pass later; if none does, the fastest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ring_notebook.api.arguments import Reduction
from ring_notebook.api.objects import allreduce_numbers
from ring_notebook.api.process_sets import ProcessSet
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.text.words import plural
from ring_notebook.torch.compression import Compression, Compressor, Int8Compression
from ring_notebook.torch.optimizer.averages import Average, Besides, in_bytes, in_floats
from ring_notebook.torch.optimizer.bucket import Bucket
from ring_notebook.torch.optimizer.compressed_gradients import groups_of

WAYS: dict[str, Compressor] = {name: getattr(Compression, name) for name in ("none", "bf16", "int8")}
"""From the most exact to the smallest."""
_SMALL = 1 << 10  # elements; so few that only the latency counts
_FIRST, _MOST = 1 << 16, 1 << 22
_ENOUGH = 0.1  # seconds; a transfer that takes as long shows the rate of a link, whatever its burst size
_NOTICED = 0.05  # part of the time of a backward pass

_measured: WeakKeyDictionary[Communicator, dict[str, Cost]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Cost:
    """Seconds of an average: ``messages`` for its latency, ``each`` for each element."""

    messages: float
    each: float

    def of(self, elements: int) -> float:
        """Seconds for ``elements``."""
        return self.messages + self.each * elements


@dataclass(frozen=True)
class Load:
    """A bucket: its elements, and how many seconds backward continues after it is full."""

    elements: int
    behind: float


def choose(loads: Sequence[Load], costs: dict[str, Cost], backward: float) -> list[str]:
    """The way of each bucket, of `WAYS`; ``backward`` are the seconds of a backward pass."""
    order = sorted(range(len(loads)), key=lambda number: -loads[number].behind)
    ways = [""] * len(loads)
    free = -backward  # when the link is free; times are seconds, 0 at the end of backward
    for place, number in enumerate(order):
        load = loads[number]
        begin = max(free, -load.behind)
        last = place == len(order) - 1
        until = (0.0 if last else -loads[order[place + 1]].behind) + _NOTICED * backward
        ends = {name: begin + costs[name].of(load.elements) for name in WAYS}
        ways[number] = next((name for name in WAYS if ends[name] <= until), min(WAYS, key=lambda one: ends[one]))
        free = ends[ways[number]]
    return ways


def measured(process_set: ProcessSet) -> dict[str, Cost]:
    """The cost of each way between the hosts of these ranks, measured once; all ranks call this."""
    communicator = process_set.communicator
    known = _measured.get(communicator)
    if known is None:
        known = _measured[communicator] = _measure(process_set)
    return known


def _measure(process_set: ProcessSet) -> dict[str, Cost]:
    _seconds("none", process_set, _SMALL)  # connections are made, memory is mapped
    elements = _FIRST
    while _seconds("none", process_set, elements) < _ENOUGH and elements < _MOST:
        elements *= 4
    costs = {}
    for name in WAYS:
        few = min(_seconds(name, process_set, _SMALL) for _ in range(2))
        many = min(_seconds(name, process_set, elements) for _ in range(2))
        costs[name] = Cost(few, max(0.0, many - few) / (elements - _SMALL))
    return costs


def _seconds(way: str, process_set: ProcessSet, elements: int) -> float:
    """Seconds until the last rank has the average of ``elements``."""
    given, how = torch.zeros(elements, device="cpu"), Reduction(ReduceOp.AVERAGE, 1.0, 1.0, process_set)
    compression, groups = WAYS[way], groups_of(process_set.communicator)
    allreduce_numbers([0], ReduceOp.SUM, "before a measurement of the link", process_set)
    began = perf_counter()
    if isinstance(compression, Int8Compression):
        Average(in_bytes([given], groups, compression, Besides(), f"link, {way}", True)).finish()
    else:
        Average(in_floats([given], how, compression, Besides(), f"link, {way}", True)).finish()
    took = round(1e9 * (perf_counter() - began))
    (slowest,) = allreduce_numbers([took], ReduceOp.MAX, "a measurement of the link", process_set)
    return 1e-9 * slowest


class LinkChoice:
    """The choices of `Compression.auto` in the present generation, by the names of a bucket's parameters."""

    def __init__(self) -> None:
        self._ways: dict[tuple[str, ...], str] = {}
        self._made: dict[Tensor, float] = {}  # when backward made a gradient
        self._reductions = 0  # since the last plan with a bucket that is not known

    def of(self, names: tuple[str, ...]) -> Compressor:
        """The compression for a bucket: none, until it is chosen."""
        return WAYS[self._ways.get(names, "none")]

    def begin(self) -> None:
        """Note that the ranks make a plan."""
        self._reductions = 0

    def note(self, parameter: Tensor) -> None:
        """Note that backward has made the gradient of ``parameter`` now."""
        if self._reductions == _THIRD - 1:
            self._made[parameter] = perf_counter()

    def end(self, buckets: Mapping[Bucket, tuple[str, ...]], ended: float, how: Reduction) -> bool:
        """After a reduction of ``buckets``, given with the names of their parameters: choose, if it is time to.

        ``ended`` is the time at which backward ended. Returns whether the ranks need a new plan. All ranks call it.
        """
        self._reductions += 1
        if self._reductions != _THIRD:
            return False
        made, self._made = self._made, {}
        if all(names in self._ways for names in buckets.values()):
            return False
        process_set = how.process_set
        behind = [min((ended - made[p] for p in bucket.parameters if p in made), default=0.0) for bucket in buckets]
        backward = max((ended - at for at in made.values()), default=0.0)
        numbers = [round(1e9 * max(0.0, one)) for one in (*behind, backward)]
        *sums, whole = allreduce_numbers(numbers, ReduceOp.SUM, "seconds of backward", process_set)
        share = 1e-9 / process_set.size()
        costs = measured(process_set)
        loads = [
            Load(sum(p.numel() for p in bucket.parameters), share * one)
            for bucket, one in zip(buckets, sums, strict=True)
        ]
        ways = choose(loads, costs, share * whole)
        self._ways.update(dict(zip(buckets.values(), ways, strict=True)))
        if process_set.rank() == 0:
            print(_line(loads, ways, costs, share * whole), file=sys.stderr, flush=True)  # noqa: T201
        return any(way != "none" for way in ways)


_THIRD = 3
"""The reduction at which the ranks choose; the first ones also create memory and threads."""


def _line(loads: Sequence[Load], ways: Sequence[str], costs: dict[str, Cost], backward: float) -> str:
    """A line for the user: the choices, and why."""

    def parts() -> Iterator[str]:
        for name in WAYS:
            chosen = [load.elements for load, way in zip(loads, ways, strict=True) if way == name]
            if chosen:
                yield f"{sum(chosen) / 1e6:.2f} million as {name} ({plural(len(chosen), 'bucket')})"

    times = ", ".join(f"{1e9 * costs[name].each:.1f} ms as {name}" for name in WAYS)
    return (
        f"Compression.auto sends of the gradients {', '.join(parts())}: a backward pass takes {1e3 * backward:.1f} ms, "
        f"and the average of a million over the hosts {times}"
    )
