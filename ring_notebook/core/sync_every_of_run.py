"""How many local steps the run in progress was started with, by ``%%ringtrain --sync-every``, and if it makes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class OfRun:
    """Steps between syncs, for optimizers that are made without a number of their own; 1 to reduce at every step."""

    every: int = 1
    is_used: bool = False
    """Whether an optimizer of the run was made with it."""

    def begin(self, every: int) -> None:
        self.every, self.is_used = every, False

    @property
    def is_lost(self) -> bool:
        """Whether the run was started with a number that no optimizer has taken."""
        return self.every > 1 and not self.is_used


of_run = OfRun()
"""That of the run in progress."""
