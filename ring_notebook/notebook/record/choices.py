"""What a person has asked of a run: the options of its cell, how its charts look, its tags and its note."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ring_notebook.notebook.record.run_files import read_json, write_json

_LABELS = "labels.json"
_LOOK = "look.json"


@dataclass(frozen=True)
class Look:
    """A log scale, smoothing, ranks that are drawn on their own, and charts of what the machines do."""

    log: bool = False
    smooth: bool = False
    ranks: frozenset[int] = frozenset()
    machine: bool = False


def read_look(directory: Path) -> Look:
    """The choice that is kept in the folder of a run; the usual look where there is none, or none of ours."""
    with suppress(ValueError, TypeError, OSError):
        kept = read_json(directory / _LOOK)
        ranks = frozenset(map(int, kept.get("ranks", ())))
        return Look(bool(kept.get("log")), bool(kept.get("smooth")), ranks, bool(kept.get("machine")))
    return Look()


def keep_look(directory: Path, look: Look) -> None:
    """Keep a choice in the folder of a run. Raises OSError when the disk does not take it."""
    write_json(directory / _LOOK, {**asdict(look), "ranks": sorted(look.ranks)})


@dataclass(frozen=True)
class Labels:
    """The tags of a run, in order, and a line about it."""

    tags: tuple[str, ...] = ()
    note: str = ""


def read_labels(directory: Path) -> Labels:
    """The labels in the folder of a run; none where there are none of ours."""
    with suppress(ValueError, TypeError, OSError):
        kept = read_json(directory / _LABELS)
        return Labels(tuple(map(str, kept.get("tags", ()))), str(kept.get("note", "")))
    return Labels()


def keep_labels(directory: Path, labels: Labels) -> None:
    """Keep labels in the folder of a run. Raises OSError when the disk does not take them."""
    write_json(directory / _LABELS, asdict(labels))


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
    resume: bool = False
    first_line: int = 2
    """The number that errors give to the first line of the cell."""
    cell_id: str = ""
    """The front end's own; empty where it has none. An edited set-up cell replaces the one of the same id."""
    one_rank: float = 0.0
    """The samples/s that the same cell has been measured to reach on one rank."""
    warmup: int = 1
    """Steps after which the account of the ranks' time begins."""

    def kept(self) -> dict[str, Any]:
        """What is kept with the run. In the background or not is a matter of the moment."""
        return {name: value for name, value in asdict(self).items() if name != "background"}

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> CellOptions:
        """The options of a run; names that another version has kept are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in kept.items() if name in known})
