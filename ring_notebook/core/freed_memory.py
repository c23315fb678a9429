"""Has malloc keep memory that a rank frees, and gives it back to the machine in time: `docs/memory.md`."""

from __future__ import annotations

import os
from time import monotonic

from ring_notebook.config import config
from ring_notebook.core.native import core
from ring_notebook.machine.process_life import resident

_LOOK = 0.25  # seconds between two looks at the machine's free memory
_LEAST = 1 << 30  # bytes

_keeps = False
_next_look = 0.0


def keep() -> None:
    """Keep freed memory from now on, in a rank of our launchers, unless the environment sets options of malloc."""
    global _keeps
    is_set = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.getenv("GLIBC_TUNABLES", "")
    is_ours = bool(config().status_file) and config().allocator == "ring"
    _keeps = is_ours and not is_set and core.keep_freed_memory()


def give_back() -> None:
    if _keeps:
        core.return_freed_memory()


def give_back_if_little_is_left() -> None:
    """Give all kept memory back if the machine has less free than 1 GiB or half of what this rank holds.

    Called between steps; looks at most four times a second. Needed because freed pieces may be a little too small for
    the next tensors, so that a rank can hold several times what it uses.
    """
    global _next_look
    if not _keeps or (now := monotonic()) < _next_look:
        return
    _next_look = now + _LOOK
    if core.memory_left() < max(_LEAST, resident(os.getpid()) // 2):
        core.return_freed_memory()
