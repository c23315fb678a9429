"""The core's communicator of the members of a group of torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed.distributed_c10d as c10d

from ring_notebook.config import config
from ring_notebook.core.communicator import Communicator

_Card = tuple[int, int, int]


def communicator_of(generation: Communicator, ranks: Sequence[int], store: c10d.Store, name: str) -> Communicator:
    """A communicator over ``ranks`` of ``generation``, called by these alone; ``name`` is new in ``store``."""
    if len(ranks) == generation.size:
        group = generation.group(ranks)
        assert group is not None
        return group
    own = list(ranks).index(generation.rank)

    def exchange(card: _Card) -> list[_Card]:
        store.set(f"{name} of {own}", " ".join(map(str, card)))
        return [_parse(store.get(f"{name} of {member}")) for member in range(len(ranks))]

    group = generation.group_of_members(ranks, exchange)
    store.delete_key(f"{name} of {own}")  # so that another generation cannot read it
    return group


def shorter_limit(timeout: timedelta) -> float:
    """The shorter of torch.distributed's limit and RING_TIMEOUT (0: none), in seconds."""
    own = config().timeout
    return min(timeout.total_seconds(), own) if own else timeout.total_seconds()


def _parse(text: bytes) -> _Card:
    block, identity, number = map(int, text.split())
    return block, identity, number
