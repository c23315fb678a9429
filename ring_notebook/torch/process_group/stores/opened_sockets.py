"""The connections that this process has opened since the ranks of a run began to find each other."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["new_sockets", "note_sockets"]

_others: set[int] = set()
"""Inodes of the sockets that were there before: those of the engine, say."""


def note_sockets() -> None:
    """Take note of the sockets that are there now."""
    _others.clear()
    _others.update(_sockets())


def new_sockets() -> list[int]:
    """The descriptors of sockets that were not there at the last `note_sockets`."""
    return [descriptor for inode, descriptor in _sockets().items() if inode not in _others]


def _sockets() -> dict[int, int]:
    """The descriptor of each open socket, by inode."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            kind, _, number = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind == "socket":
                found[int(number.strip("[]"))] = int(name)
    return found
