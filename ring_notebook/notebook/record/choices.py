"""What a person has asked of a run: the options of its cell, how its charts look, its tags and its note."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ring_notebook.notebook.record.run_files import read_json, write_json

_LABELS = "labels.json"
_LOOK = "look.json"


STEP, TIME = "step", "time"
AXES = (STEP, TIME, "samples", "epoch")  # what the x axis of a metric can be
USUAL_SMOOTH, MOST_SMOOTH = 0.9, 0.99


@dataclass(frozen=True)
class Look:
    """How a reader wants to see the charts.

    ``log``: a logarithmic scale. ``smooth``: the share of the previous value in an exponential average, 0 for none.
    ``ranks`` are drawn on their own. ``machine``: also charts of what the machines do. ``x``: the axis of metrics, one
    of AXES. ``search``: words that the name of a metric must have. ``groups`` are shown
    as a whole.
    """

    log: bool = False
    smooth: float = 0.0
    ranks: frozenset[int] = frozenset()
    machine: bool = False
    x: str = STEP
    search: str = ""
    groups: frozenset[str] = frozenset()


def read_look(directory: Path) -> Look:
    """The choice that is kept in the folder of a run; the usual look where there is none, or none of ours."""
    with suppress(ValueError, TypeError, OSError):
        kept = read_json(directory / _LOOK)
        smooth = kept.get("smooth", 0.0)
        smooth = USUAL_SMOOTH * smooth if isinstance(smooth, bool) else min(max(float(smooth), 0.0), MOST_SMOOTH)
        return Look(
            bool(kept.get("log")),
            smooth,
            frozenset(map(int, kept.get("ranks", ()))),
            bool(kept.get("machine")),
            str(kept.get("x", STEP)),
            str(kept.get("search", "")),
            frozenset(map(str, kept.get("groups", ()))),
        )
    return Look()


def keep_look(directory: Path, look: Look) -> None:
    """Keep a choice in the folder of a run. Raises OSError when the disk does not take it."""
    write_json(directory / _LOOK, {**asdict(look), "ranks": sorted(look.ranks), "groups": sorted(look.groups)})


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
    replay: str = ""
    """The run whose changes of knobs are made again."""
    first_line: int = 2
    """The number that errors give to the first line of the cell."""
    cell_id: str = ""
    """The front end's own; empty where it has none. An edited set-up cell replaces the one of the same id."""
    one_rank: float = 0.0
    """The samples/s that the same cell has been measured to reach on one rank."""
    snapshot: float = 0.0
    """Seconds between two snapshots of the run; 0 for none."""
    branch: Mapping[str, Any] = field(default_factory=dict)
    """Of a run that begins where another one was: ``of`` names that and the step; where in the cell it begins."""
    sync_every: int = 1
    """Local steps between two syncs, for optimizers that are made without a number of their own."""
    warmup: int = 1
    """Steps after which the account of the ranks' time begins."""

    def kept(self) -> dict[str, Any]:
        """What is kept with the run. In the background or not is a matter of the moment."""
        return {name: value for name, value in asdict(self).items() if name != "background"}

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> CellOptions:
        """The options of a run; names that another version has kept are left out."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in kept.items() if name in known})
