"""What the ranks settle before they reduce gradients for the first time: the same parameters, sparse ones, overlap.

It takes two small sums and no allgather: ranks that have joined, and contribute zeros, do not stand in the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from random import SystemRandom

from ring_notebook.api.buckets.bucket_plan import ParameterSpec
from ring_notebook.api.objects import gather_objects
from ring_notebook.api.process_sets import ProcessSet
from ring_notebook.api.small_sums import allreduce_numbers
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.errors import CollectiveMismatch

__all__ = ["agree_on_plan", "agree_on_sparse"]

_random = SystemRandom()  # that of a script may be seeded alike for all of its optimizers


def agree_on_plan(
    specs: Sequence[ParameterSpec], division: object, threaded: bool, process_set: ProcessSet
) -> tuple[bool, str]:
    """Whether some rank wants to reduce during backward, and a mark, once all ranks are known to make the same plan.

    The mark is equal on all ranks, and tells the plan from all others that they may use at the same time. ``division``
    stands for all that divides the parameters into buckets. Raises CollectiveMismatch on every rank,
    naming the first difference, when the ranks' ``specs`` or ``division`` are not the same.
    """
    digest = int.from_bytes(blake2b(repr((specs, division)).encode(), digest_size=6).digest(), "big")
    parts = [digest >> 24, digest & 0xFFFFFF]  # small enough for int64 to hold the sum of their squares
    shared = [1, int(threaded), _random.getrandbits(32), *parts, *(part * part for part in parts)]
    ranks, any_threaded, mark, *sums = allreduce_numbers(shared, ReduceOp.SUM, "bucket plan", process_set)
    # Numbers are all equal if and only if their count times the sum of their squares is the square of their sum.
    if any(ranks * squares != total * total for total, squares in zip(sums[:2], sums[2:], strict=True)):
        raise CollectiveMismatch(_difference(specs, process_set))
    return any_threaded > 0, f"{mark:x}"


def agree_on_sparse(sparse: Sequence[bool], process_set: ProcessSet) -> list[bool]:
    """Which parameters have a sparse gradient on some rank; ``sparse`` says which have one on this rank."""
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
        "same groups and the same RING_FUSION_THRESHOLD"
    )


def _describe(specs: Sequence[ParameterSpec], index: int) -> str:
    if index >= len(specs):
        return "missing"
    spec = specs[index]
    return f"{spec.name!r} {tuple(spec.shape)} {spec.dtype.name.lower()}"
