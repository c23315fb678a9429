"""Which interface of this host leads to the other hosts of a job, and the variables that keep MPI and Gloo to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterable, Mapping

from ring_notebook.config import config
from ring_notebook.hardware import RDMA

_SIOCGIFADDR = 0x8915
_PORT = 9  # nothing is sent to it


def network_variables(others: Iterable[str], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that keep MPICH's UCX and Gloo to one interface.

    It is RING_INTERFACE, else the one that leads to ``others``, names of other hosts. RDMA devices stay in use: they
    have no ports that anybody could connect to. What the user has set stays. Empty where no interface can be found.
    """
    interface = config().interface or interface_towards(others)
    if not interface:
        return {}
    devices = [interface, *(f"{port.parts[-3]}:{port.name}" for port in sorted(RDMA.glob("*/ports/*")))]
    variables = {"UCX_NET_DEVICES": ",".join(devices), "GLOO_SOCKET_IFNAME": interface}
    return {name: value for name, value in variables.items() if name not in env}


def address_towards(other: str) -> str:
    """The address of this host on the route to ``other``. Raises OSError where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, _PORT))  # sends nothing; the kernel picks the route, and with it our address
        return str(probe.getsockname()[0])


def interface_towards(others: Iterable[str]) -> str:
    """The interface of the route to the first of ``others`` whose name resolves to an IPv4 address; empty for none."""
    for other in others:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            own = socket.inet_aton(address_towards(other))
            for _, name in socket.if_nameindex():
                if _address(asked, name) == own:
                    return name
    return ""


def _address(asked: socket.socket, name: str) -> bytes:
    with contextlib.suppress(OSError):  # it has no IPv4 address
        return fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24]
    return b""
