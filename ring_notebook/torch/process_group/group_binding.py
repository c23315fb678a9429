"""A communicator of its own for a process group: made by all ranks of the epoch, or by the members alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed.distributed_c10d as c10d

from ring_notebook.core.communicator import Communicator

Card = tuple[int, int, int]


def bind(epoch: Communicator, ranks: Sequence[int], store: c10d.Store, name: str) -> Communicator:
    """A communicator over ``ranks`` of ``epoch``, called by these alone; ``name`` is new in ``store``."""
    if len(ranks) == epoch.size:
        group = epoch.group(ranks)
        assert group is not None
        return group
    own = list(ranks).index(epoch.rank)

    def exchange(card: Card) -> list[Card]:
        store.set(f"{name} of {own}", " ".join(map(str, card)))
        return [_parse(store.get(f"{name} of {member}")) for member in range(len(ranks))]

    group = epoch.group_of_members(ranks, exchange)
    store.delete_key(f"{name} of {own}")  # nobody may take it for that of another epoch
    return group


def _parse(text: bytes) -> Card:
    block, identity, number = map(int, text.split())
    return block, identity, number
