"""What the ranks settle before they reduce gradients for the first time: the same parameters, sparse ones, overlap.

It takes two small allreduces and no allgather, so that ranks that have joined do not stand in the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch

from ring_notebook.core.communicator import ReduceOp
from ring_notebook.errors import CollectiveMismatch
from ring_notebook.torch.buckets import ParameterSpec
from ring_notebook.torch.objects import gather_objects
from ring_notebook.torch.process_sets import ProcessSet
from ring_notebook.torch.reducing import allreduce_

__all__ = ["agree"]

_TOP = 1 << 56


def agree(
    specs: Sequence[ParameterSpec], sparse: Sequence[bool], threaded: bool, process_set: ProcessSet
) -> tuple[list[bool], bool]:
    """Which parameters have a sparse gradient on some rank, and whether some rank wants to reduce during backward.

    Raises CollectiveMismatch on every rank, naming the first difference, when the ranks' ``specs`` are not the same.
    """
    digest = int.from_bytes(blake2b(repr(specs).encode(), digest_size=7).digest(), "big")
    # The largest digest and the largest complement add up to _TOP only if all digests are equal.
    shared = torch.tensor([digest, _TOP - digest, threaded], dtype=torch.int64)
    allreduce_(shared, name="bucket plan", op=ReduceOp.MAX, process_set=process_set)
    largest, largest_complement, any_threaded = shared.tolist()
    if largest + largest_complement != _TOP:
        raise CollectiveMismatch(_difference(specs, process_set))
    kinds = torch.tensor(sparse, dtype=torch.uint8)
    allreduce_(kinds, name="sparse gradients", op=ReduceOp.MAX, process_set=process_set)
    return [bool(kind) for kind in kinds.tolist()], bool(any_threaded)


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
                    f"rank {process_set.communicator.ranks[process_set.rank()]}: the ranks optimize different "
                    f"parameters. Parameter {index} is {here} on rank {ranks[0]} and {there} on rank {rank}; build "
                    "the same model and optimizer on every rank"
                )
    return "the ranks optimize different parameters"


def _describe(specs: Sequence[ParameterSpec], index: int) -> str:
    if index >= len(specs):
        return "missing"
    spec = specs[index]
    return f"{spec.name!r} {tuple(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"
