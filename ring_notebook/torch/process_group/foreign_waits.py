"""Ends waits in the C++ of other backends, which look at no signal: their connections are shut down."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

import torch.distributed.distributed_c10d as registry

from ring_notebook.torch.process_group.identity import GroupIdentity
from ring_notebook.torch.process_group.stores.opened_sockets import new_sockets

__all__ = ["end_foreign_waits"]


def end_foreign_waits() -> None:
    """Have this rank raise in what it waits for in groups of other backends. Any thread may call it.

    Gloo's own ``abort`` leaves a wait where it is. A connection that is shut down ends it, here and on the other side.
    Takes TCP connections that were opened since the ranks of the run found each other for those of such groups.
    """
    if all(isinstance(group, GroupIdentity) for group in list(registry._world.pg_map)):
        return
    for descriptor in new_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                connection.getpeername()  # raises for a socket that listens: Gloo ends the process when one fails
                connection.shutdown(socket.SHUT_RDWR)
