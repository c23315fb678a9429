"""What the line of a cell's magic asks for, kept with its run so that the cell can run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class CellOptions:
    """The options of one cell; ``%%ringtrain -h`` explains those that a user types."""

    n: int | None = None
    ranks: Sequence[int] | None = None
    name: str = ""
    timeout: float = 0.0
    plot: Sequence[str] = ()
    timeline: bool = False
    horovod: bool = False
    background: bool = False
    setup: bool = False
    first_line: int = 2
    """The number that errors give to the first line of the cell."""
    cell_id: str = ""
    """The front end's own; empty where it has none. An edited set-up cell replaces the one of the same id."""
    one_rank: float = 0.0
    """The samples/s that the same cell has been measured to reach on one rank."""

    def kept(self) -> dict[str, Any]:
        """What is kept with the run. In the background or not is a matter of the moment."""
        return {name: value for name, value in asdict(self).items() if name != "background"}

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> CellOptions:
        """The options of a run; names that another version has kept are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in kept.items() if name in known})
