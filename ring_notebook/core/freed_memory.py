"""What malloc keeps of the memory that a rank frees, and when it goes back to the machine: `docs/memory.md`."""

from __future__ import annotations

import os
from time import monotonic

from ring_notebook.config import config
from ring_notebook.core.native import core
from ring_notebook.machine.process_life import resident

_LOOK = 0.25  # seconds between two looks at what is left
_LEAST = 1 << 30  # bytes

_keeps = False
_next_look = 0.0


def keep() -> None:
    """Keep it from now on in a rank that a launcher of ours has started, unless somebody has set what malloc does."""
    global _keeps
    is_set = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.getenv("GLIBC_TUNABLES", "")
    is_ours = bool(config().status_file) and config().allocator == "ring"
    _keeps = is_ours and not is_set and core.keep_freed_memory()


def give_back() -> None:
    if _keeps:
        core.return_freed_memory()


def give_back_if_little_is_left() -> None:
    """Give all back where the machine has less left than 1 GiB, or half of what this rank holds.

    For between steps: it looks four times a second at most. A piece that is freed may be a little too small for the
    next tensor, which is then taken beside it, so that a rank can hold several times what it uses.
    """
    global _next_look
    if not _keeps or (now := monotonic()) < _next_look:
        return
    _next_look = now + _LOOK
    if core.memory_left() < max(_LEAST, resident(os.getpid()) // 2):
        core.return_freed_memory()
