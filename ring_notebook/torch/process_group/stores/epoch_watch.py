"""Tells a rank that waits for others outside of the core when these will not come: they have failed, or left."""

from __future__ import annotations

import time

from ring_notebook.core import world
from ring_notebook.errors import CollectiveAborted

_BETWEEN_LOOKS = 0.25  # seconds


class EpochWatch:
    """The watch of one wait, over the epoch in which it began; any thread waits."""

    def __init__(self, waits_for: str) -> None:
        """``waits_for`` completes "rank 0 waits for"."""
        self._waits_for = waits_for
        self._world = world.current() if world.is_initialized() else None
        self._look = time.monotonic()

    def check(self) -> None:
        """Raise CollectiveAborted where a rank of the epoch failed or left, or the epoch has ended.

        Looks four times a second however often it is called.
        """
        now = time.monotonic()
        if now - self._look < _BETWEEN_LOOKS:
            return
        self._look = now
        if self._world is None or not world.is_open(self._world):
            raise CollectiveAborted(f"the run ended while this process waited for {self._waits_for}")
        communicator = self._world.communicator
        if not communicator.aborted:
            gone = [entry["rank"] for entry in communicator.snapshot() if entry["state"] == "left"]
            if gone:
                communicator.abort(
                    f"rank {gone[0]} has left (its cell or script ended) while rank {self._world.rank} waits for "
                    f"{self._waits_for}"
                )
        if communicator.aborted:
            communicator.barrier()  # raises with the reason
