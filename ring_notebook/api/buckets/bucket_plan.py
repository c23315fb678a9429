"""The bucket plan: which gradients are reduced together, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from ring_notebook.core.buffers import DType

__all__ = ["BucketPlan", "ParameterSpec", "plan_buckets"]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What all ranks have to agree on about a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket: gradients of one dtype, by the indices of their parameters, in the order of backward."""

    dtype: DType
    parameters: tuple[int, ...]


def plan_buckets(
    parameters: Sequence[ParameterSpec], threshold: int, groups: Iterable[Iterable[int]] = ()
) -> tuple[BucketPlan, ...]:
    """Buckets for ``parameters``, in the order in which they are reduced.

    Backward makes gradients in roughly the reverse order of registration, so parameters are taken from the last to
    the first. A bucket is closed before it would exceed ``threshold`` bytes; a larger gradient has one to itself. The
    parameters of each group (given by index) share buckets with no others, whatever their size.
    """
    group_of = {index: number for number, group in enumerate(groups) for index in group}
    closed: list[BucketPlan] = []
    open_buckets: dict[tuple[DType, int | None], list[int]] = {}
    filled: dict[tuple[DType, int | None], int] = {}  # bytes
    for index in reversed(range(len(parameters))):
        spec = parameters[index]
        key = (spec.dtype, group_of.get(index))
        nbytes = spec.count * spec.dtype.itemsize
        if key[1] is None and filled.get(key, 0) and filled[key] + nbytes > threshold:
            closed.append(BucketPlan(spec.dtype, tuple(open_buckets.pop(key))))
            filled[key] = 0
        open_buckets.setdefault(key, []).append(index)
        filled[key] = filled.get(key, 0) + nbytes
    closed += [BucketPlan(dtype, tuple(indices)) for (dtype, _), indices in open_buckets.items()]
    # The bucket that backward fills first goes first: backward completes it with its lowest index.
    return tuple(sorted(closed, key=lambda plan: -plan.parameters[-1]))
