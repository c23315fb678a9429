"""What the ranks settle before they reduce gradients for the first time: the same parameters, sparse ones, overlap.

It takes two small sums and no allgather: ranks that have joined, and contribute zeros, do not stand in the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch

from ring_notebook.core.communicator import ReduceOp
from ring_notebook.errors import CollectiveMismatch
from ring_notebook.torch.collectives.allreduce import allreduce_
from ring_notebook.torch.collectives.objects import gather_objects
from ring_notebook.torch.optimizer.bucket_plan import ParameterSpec
from ring_notebook.torch.process_sets import ProcessSet

__all__ = ["agree"]


def agree(
    specs: Sequence[ParameterSpec], division: object, sparse: Sequence[bool], threaded: bool, process_set: ProcessSet
) -> tuple[list[bool], bool]:
    """Which parameters have a sparse gradient on some rank, and whether some rank wants to reduce during backward.

    ``division`` stands for all that divides the parameters into buckets. Raises CollectiveMismatch on every rank,
    naming the first difference, when the ranks' ``specs`` or ``division`` are not the same.
    """
    digest = int.from_bytes(blake2b(repr((specs, division)).encode(), digest_size=6).digest(), "big")
    parts = [digest >> 24, digest & 0xFFFFFF]  # small enough for int64 to hold the sum of their squares
    shared = torch.tensor([1, threaded, *parts, *(part * part for part in parts)], dtype=torch.int64)
    allreduce_(shared, name="bucket plan", op=ReduceOp.SUM, process_set=process_set)
    ranks, any_threaded, *sums = shared.tolist()
    # Numbers are all equal if and only if their count times the sum of their squares is the square of their sum.
    if any(ranks * squares != total * total for total, squares in zip(sums[:2], sums[2:], strict=True)):
        raise CollectiveMismatch(_difference(specs, process_set))
    kinds = torch.tensor(sparse, dtype=torch.int32)
    allreduce_(kinds, name="sparse gradients", op=ReduceOp.SUM, process_set=process_set)
    return [kind > 0 for kind in kinds.tolist()], any_threaded > 0


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
    return f"{spec.name!r} {tuple(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"
