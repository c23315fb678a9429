"""All options of all parameter groups, compared on all ranks in one collective before a fused step writes anything."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from ring_notebook.api.objects import allreduce_numbers, gather_objects
from ring_notebook.api.process_sets import ProcessSet
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.errors import CollectiveMismatch

Options = dict[str, Any]


def check_same_options(groups: Sequence[Options], process_set: ProcessSet) -> None:
    """Raise CollectiveMismatch on every rank, naming the first group that differs, unless all ranks have ``groups``."""
    digest = int.from_bytes(blake2b(repr(groups).encode(), digest_size=7).digest(), "big")
    extremes = [digest, -digest]  # the maximum of both is the greatest digest, and minus the least
    greatest, least = allreduce_numbers(extremes, ReduceOp.MAX, "fused options", process_set)
    if greatest != -least:
        raise CollectiveMismatch(_difference(groups, process_set))


def _difference(groups: Sequence[Options], process_set: ProcessSet) -> str:
    ranks = process_set.ranks or []
    lists: list[list[Options]] = gather_objects(list(groups), "fused options", process_set)
    here = f"rank {ranks[process_set.rank()]}: step: "
    for rank, other in zip(ranks[1:], lists[1:], strict=True):
        for number, (first, second) in enumerate(zip(lists[0], other, strict=False)):
            names = [name for name in first if first[name] != second.get(name)]
            if names:
                shown = (", ".join(f"{name}={one.get(name)}" for name in names) for one in (first, second))
                return (
                    f"{here}the ranks disagree on parameter group {number}: rank {ranks[0]} has {next(shown)}, rank "
                    f"{rank} has {next(shown)}. No parameter was updated; set the same options on every rank and call "
                    "step() again"
                )
    return (
        f"{here}the ranks have different numbers of parameter groups, by rank: {[len(other) for other in lists]}; "
        "build the same optimizer on every rank"
    )
