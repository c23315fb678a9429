"""Takes the names off shared memory that MPICH opens, so that ranks which are killed leave no file behind."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def unname_shared_memory() -> None:
    """Unlink the files in /dev/shm that MPICH has mapped into this process; the memory stays.

    MPICH removes them in MPI_Finalize alone, which a rank that is killed never reaches. Call it after a
    barrier that follows MPI's start: the other ranks of the host open the files by name. Open MPI's launcher
    removes its own.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith("/dev/shm/mpich_"):
            with contextlib.suppress(OSError):  # a rank of this host was faster
                os.unlink(path)
