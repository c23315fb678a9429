"""The bucket plan: which gradients are reduced together, and where each lies in its bucket.

A bucket holds gradients of one dtype, each starting at a multiple of `ALIGNMENT` bytes, and behind them one presence
flag per gradient:

    | gradient 0 ..| gradient 1 ......| ... | flag 0 | flag 1 | ... |

A rank sets the flag of each gradient it has. After the reduction a flag above zero says that some rank had it; a
gradient that no rank had stays None, as it would in a single process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

__all__ = ["ALIGNMENT", "BucketPlan", "ParameterSpec", "Slot", "plan_buckets"]

ALIGNMENT = 64  # bytes: a cache line, and the widest vector


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What all ranks have to agree on about a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the gradient of parameter ``index`` lies in its bucket; ``offset`` counts elements."""

    index: int
    offset: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket: the slots in the order in which backward fills them, then the flags from element ``flags`` on."""

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    flags: int

    @property
    def count(self) -> int:
        """Number of elements in all."""
        return self.flags + len(self.slots)


def plan_buckets(
    parameters: Sequence[ParameterSpec], threshold: int, groups: Iterable[Iterable[int]] = ()
) -> tuple[BucketPlan, ...]:
    """Buckets for ``parameters``, in the order in which they are reduced.

    Backward makes gradients in roughly the reverse order of registration, so parameters are taken from the last to
    the first. A bucket is closed before it would exceed ``threshold`` bytes; a larger gradient has one to itself. The
    parameters of each group (given by index) share buckets with no others, whatever their size.
    """
    group_of = {index: number for number, group in enumerate(groups) for index in group}
    closed: list[list[Slot]] = []
    open_buckets: dict[tuple[torch.dtype, int | None], list[Slot]] = {}
    ends: dict[tuple[torch.dtype, int | None], int] = {}
    for index in reversed(range(len(parameters))):
        spec = parameters[index]
        key = (spec.dtype, group_of.get(index))
        align = max(1, ALIGNMENT // spec.dtype.itemsize)
        offset = -(-ends.get(key, 0) // align) * align
        if key[1] is None and offset and (offset + spec.count) * spec.dtype.itemsize > threshold:
            closed.append(open_buckets.pop(key))
            offset = 0
        open_buckets.setdefault(key, []).append(Slot(index, offset))
        ends[key] = offset + spec.count
    closed += open_buckets.values()
    # The bucket that backward fills first goes first: backward fills it when it comes to its lowest index.
    closed.sort(key=lambda slots: -slots[-1].index)
    return tuple(_bucket(slots, parameters) for slots in closed)


def _bucket(slots: list[Slot], parameters: Sequence[ParameterSpec]) -> BucketPlan:
    last = slots[-1]
    return BucketPlan(parameters[last.index].dtype, tuple(slots), last.offset + parameters[last.index].count)
