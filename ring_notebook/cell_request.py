"""A cell as a kernel sends it to the engines that execute it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CellRequest:
    """The cell of ``run``, to be executed in a new ``epoch`` over ``engines``, which are its ranks in this order."""

    run: str
    epoch: int
    engines: list[int]
    source: str
    first_line: int
    recorded: bool = False
    """Whether ranks send a Trace of their collectives at the end; if one fails, they send one of the last of them."""
    horovod: bool = False
    """Whether the cell imports this package under Horovod's names."""
    only: Sequence[int] = ()
    """If there are any, these engines execute the cell, and the others leave the epoch at once: rank and size are those
    of all, and a collective raises."""
    lost: Sequence[int] = ()
    """The engines of the cluster that have died."""
    checkpoints: str = ""
    """The folder for those of the run."""
    resume: str = ""
    """The checkpoint that it resumes from, or empty."""
    warmup: int = 1
    """Steps after which the account of a rank's time begins."""
    replay: Sequence[Mapping[str, Any]] = ()
    """The changes of knobs of another run, to be made again at the same points."""
    branch: Mapping[str, Any] = field(default_factory=dict)
    """Where in the cell it begins, if it continues the run of a snapshot that was restored."""
    sync_every: int = 1
    """Local steps between two syncs, for optimizers that are made without a number of their own."""
