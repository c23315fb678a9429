"""What an engine needs after a cell that has used up all descriptors or memory, to record how the cell ended."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

__all__ = ["HeldBack"]

_DESCRIPTORS = 16  # libzmq ends its process when it cannot open a socket
_BYTES = 32 << 20  # of an address space that may be limited: a thread takes 8 MiB. Nobody writes there


class HeldBack:
    """While the block runs it cannot have these descriptors and this memory; afterwards they are free."""

    # No generator: contextlib sets an attribute of the exception that leaves the block, which a user's may refuse.
    def __enter__(self) -> None:
        self._descriptors: list[int] = []
        self._memory: list[mmap.mmap] = []
        with suppress(OSError, MemoryError):  # earlier cells may hold all that is left
            self._memory.append(mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ))
            while len(self._descriptors) < _DESCRIPTORS:
                self._descriptors.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def __exit__(self, *_: object) -> None:
        for one in self._memory:
            one.close()
        for descriptor in self._descriptors:
            with suppress(OSError):  # the cell has closed what is not its own
                os.close(descriptor)
