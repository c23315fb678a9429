"""What an engine needs after a cell that has used up all descriptors or memory, to record how the cell ended."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["held_back"]

_DESCRIPTORS = 16  # libzmq ends its process when it cannot open a socket
_BYTES = 32 << 20  # of an address space that may be limited: a thread takes 8 MiB. Nobody writes there


@contextmanager
def held_back() -> Iterator[None]:
    """While the block runs it cannot have these descriptors and this memory; afterwards they are free."""
    descriptors: list[int] = []
    memory: list[mmap.mmap] = []
    with suppress(OSError, MemoryError):  # earlier cells may hold all that is left
        memory.append(mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ))
        while len(descriptors) < _DESCRIPTORS:
            descriptors.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    try:
        yield
    finally:
        for one in memory:
            one.close()
        for descriptor in descriptors:
            with suppress(OSError):  # the cell has closed what is not its own
                os.close(descriptor)
