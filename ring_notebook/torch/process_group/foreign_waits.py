"""Ends waits in the C++ of other backends, which look at no signal: their connections are shut down."""

from __future__ import annotations

import os
import socket
from collections.abc import Set
from contextlib import suppress

import torch.distributed.distributed_c10d as registry

from ring_notebook.torch.process_group.identity import GroupIdentity
from ring_notebook.torch.process_group.stores.listening_ports import listening_ports

__all__ = ["end_foreign_waits"]


def end_foreign_waits() -> None:
    """Have this rank raise in what it waits for in groups of other backends. Any thread may call it.

    Gloo's own ``abort`` leaves a wait where it is. A connection that is shut down ends it, here and on the other side.
    Connections of groups are those to and from the ports that the groups have told their ranks; others stay.
    """
    ports = listening_ports()
    if not ports or all(isinstance(group, GroupIdentity) for group in list(registry._world.pg_map)):
        return
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                _shut_down_between(ports, int(name))


def _shut_down_between(ports: Set[int], descriptor: int) -> None:
    """Shut a socket down if it is a connection from or to one of ``ports``; OSError for other sockets."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return
        # The peer of a socket that listens raises: Gloo ends the process when such a one fails.
        if {connection.getpeername()[1], connection.getsockname()[1]} & ports:
            connection.shutdown(socket.SHUT_RDWR)
