"""``init_method="env://"``, the default of torch.distributed, for ranks that we started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch.distributed.distributed_c10d as c10d

from ring_notebook.core import world
from ring_notebook.rank.rank_variables import is_of_this_job
from ring_notebook.torch.process_group.stores.run_store import run_store

Found = Iterator[tuple[c10d.Store, int, int]]


def rendezvous(
    url: str, otherwise: Callable[..., Found], timeout: timedelta = c10d.default_pg_timeout, **kwargs: Any
) -> Found:
    """The store, the rank and the size of this process, as torch's handlers of rendezvous give them.

    Ranks of our job or run meet in a `RunStore`; others, as those of torchrun, as ``otherwise`` has it.
    """
    query = dict(parse_qsl(urlparse(url).query))
    rank = int(query.get("rank", os.environ.get("RANK", -1)))
    size = int(query.get("world_size", os.environ.get("WORLD_SIZE", -1)))
    if not is_of_this_job(rank, size):
        yield from otherwise(url, timeout=timeout, **kwargs)
        return
    if not world.is_initialized() or world.is_aborted():
        world.init()
    yield run_store(timeout), rank, size
    raise RuntimeError("a second rendezvous needs a new init_process_group")
