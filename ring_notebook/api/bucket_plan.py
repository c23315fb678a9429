"""The bucket plan: which gradients are reduced together, in which order, and how the ranks agree on it.

The agreement takes two small sums and no allgather, so that joined ranks, which contribute zeros, do not disturb it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from random import SystemRandom
from typing import NamedTuple

from ring_notebook.api.objects import allreduce_numbers, are_alike, gather_objects
from ring_notebook.api.process_sets import ProcessSet
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.errors import CollectiveMismatch


# No dataclass: an interrupt in a dataclass's repr can turn reprs of later objects at its address into "...".
class ParameterSpec(NamedTuple):
    """The properties of a parameter that all ranks must agree on."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def elements(self) -> int:
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
    the first. A bucket is closed before it would exceed ``threshold`` bytes; a larger gradient has a bucket of its own.
    The parameters of each group (given by index) share one bucket per dtype with no others, whatever their size.
    """
    group_of = {index: number for number, group in enumerate(groups) for index in group}
    closed: list[BucketPlan] = []
    open_buckets: dict[tuple[DType, int | None], list[int]] = {}
    filled: dict[tuple[DType, int | None], int] = {}  # bytes
    for index in reversed(range(len(parameters))):
        spec = parameters[index]
        key = (spec.dtype, group_of.get(index))
        nbytes = spec.elements * spec.dtype.itemsize
        if key[1] is None and filled.get(key, 0) and filled[key] + nbytes > threshold:
            closed.append(BucketPlan(spec.dtype, tuple(open_buckets.pop(key))))
            filled[key] = 0
        open_buckets.setdefault(key, []).append(index)
        filled[key] = filled.get(key, 0) + nbytes
    closed += [BucketPlan(dtype, tuple(indices)) for (dtype, _), indices in open_buckets.items()]
    # The bucket that backward fills first goes first: backward completes it with its lowest index.
    return tuple(sorted(closed, key=lambda plan: -plan.parameters[-1]))


_random = SystemRandom()  # a script may seed Python's own before each of its optimizers


def agree_on_plan(
    specs: Sequence[ParameterSpec], division: object, threaded: bool, process_set: ProcessSet
) -> tuple[bool, str]:
    """Check that all ranks make the same plan. Returns whether some rank reduces during backward, and a mark.

    The mark is equal on all ranks, and distinguishes the plan from others in use at the same time. ``division`` is
    everything that decides how parameters are divided into buckets. Raises CollectiveMismatch on every rank, naming the
    first difference, when the ranks' ``specs`` or ``division`` differ.
    """
    digest = int.from_bytes(blake2b(repr((specs, division)).encode(), digest_size=6).digest(), "big")
    alike, sums = are_alike(digest, "bucket plan", process_set, int(threaded), _random.getrandbits(32))
    if not alike:
        raise CollectiveMismatch(_difference(specs, process_set))
    any_threaded, mark = sums
    return any_threaded > 0, f"{mark:x}"


def agree_on_sparse(sparse: Sequence[bool], process_set: ProcessSet) -> list[bool]:
    """Whether each parameter has a sparse gradient on some rank; ``sparse`` says whether on this rank."""
    if not sparse:
        return []
    counts = allreduce_numbers([int(here) for here in sparse], ReduceOp.SUM, "sparse gradients", process_set)
    return [count > 0 for count in counts]


def _difference(specs: Sequence[ParameterSpec], process_set: ProcessSet) -> str:
    ranks = process_set.ranks or []
    lists = gather_objects(list(specs), "parameters", process_set)
    for rank, other in zip(ranks[1:], lists[1:], strict=True):
        if other == lists[0]:
            continue
        for index in range(max(len(other), len(lists[0]))):
            here, there = (_describe(found, index) for found in (lists[0], other))
            if here != there:
                return (
                    f"rank {ranks[process_set.rank()]}: the ranks optimize different "
                    f"parameters. Parameter {index} is {here} on rank {ranks[0]} and {there} on rank {rank}; build "
                    "the same model and optimizer on every rank"
                )
    return (
        f"rank {ranks[process_set.rank()]}: the ranks put the same parameters into different buckets; give them the "
        "same groups, compression and RING_FUSION_THRESHOLD"
    )


def _describe(specs: Sequence[ParameterSpec], index: int) -> str:
    if index >= len(specs):
        return "missing"
    spec = specs[index]
    return f"{spec.name!r} {tuple(spec.shape)} {spec.dtype.name.lower()}"
