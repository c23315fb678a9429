"""The ports at which groups of other backends listen, read from the addresses that they put into a run's store."""

from __future__ import annotations

import re

__all__ = ["forget_ports", "listening_ports", "note_addresses"]

_IPV4 = re.compile(rb"\x02\x00(..)....\x00{8}", re.DOTALL)
_IPV6 = re.compile(rb"\x0a\x00(..)\x00{4}.{16}", re.DOTALL)
"""A ``sockaddr_in`` and a ``sockaddr_in6`` of Linux: family, port, and what else they hold."""
_ports: set[int] = set()


def note_addresses(value: str | bytes) -> None:
    """Take note of the socket addresses in ``value``, as Gloo sends them to the other ranks."""
    if isinstance(value, bytes):
        for form in (_IPV4, _IPV6):
            _ports.update(int.from_bytes(port, "big") for port in form.findall(value))
        _ports.discard(0)


def listening_ports() -> frozenset[int]:
    """The ports of this rank and of the others that have been noted since `forget_ports`."""
    return frozenset(_ports)


def forget_ports() -> None:
    """Begin anew, in a store of which nobody has taken addresses yet."""
    _ports.clear()
