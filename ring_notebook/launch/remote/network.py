"""Which interface of this host leads to the other hosts of a job, and the variables that keep MPI and Gloo to it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable

from ring_notebook.config import config
from ring_notebook.machine.hardware import RDMA

_PORT = 9  # nothing is sent to it


def network_variables(others: Iterable[str]) -> dict[str, str]:
    """The variables that keep MPICH's UCX and Gloo to one interface.

    It is RING_INTERFACE, else the one that leads to ``others``, names of other hosts. RDMA devices stay in use: they
    have no ports that anybody could connect to. What the user has set stays. Empty where no interface can be found.
    """
    interface = config().interface or interface_towards(others)
    if not interface:
        return {}
    devices = [interface, *(f"{port.parts[-3]}:{port.name}" for port in sorted(RDMA.glob("*/ports/*")))]
    variables = {"UCX_NET_DEVICES": ",".join(devices), "GLOO_SOCKET_IFNAME": interface}
    return {name: value for name, value in variables.items() if name not in os.environ}


def address_towards(other: str) -> str:
    """The address of this host on the route to ``other``, of IPv4 where both have one.

    Raises OSError where there is no route.
    """
    found = socket.getaddrinfo(other, _PORT, type=socket.SOCK_DGRAM)
    refused: OSError | None = None
    for family, kind, _, _, address in sorted(found, key=lambda one: one[0] != socket.AF_INET):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(address)  # sends nothing; the kernel picks the route, and with it our address
                return str(probe.getsockname()[0])
            except OSError as error:
                refused = error
    raise refused or OSError(f"{other} has no address")


def interface_towards(others: Iterable[str]) -> str:
    """The interface of the route to the first of ``others`` that has an address; empty for none."""
    for other in others:
        import psutil  # only jobs over several hosts need it

        with contextlib.suppress(OSError):
            own = address_towards(other).partition("%")[0]
            for name, addresses in psutil.net_if_addrs().items():
                if any(one.address.partition("%")[0] == own for one in addresses):
                    return str(name)
    return ""
