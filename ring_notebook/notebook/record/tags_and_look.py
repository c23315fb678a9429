"""What a person has asked of a run that is on disk: how its charts look, its tags and its note."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

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
    of AXES. ``search``: words that the name of a metric must have. ``groups`` are shown as a whole.
    """

    log: bool = False
    smooth: float = 0.0
    ranks: frozenset[int] = frozenset()
    machine: bool = False
    x: str = STEP
    search: str = ""
    groups: frozenset[str] = frozenset()


def read_look(directory: Path) -> Look:
    """The choice that is kept in the folder of a run; the usual look if there is none, or an unreadable one."""
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
    """The labels in the folder of a run; none if there are none, or unreadable ones."""
    with suppress(ValueError, TypeError, OSError):
        kept = read_json(directory / _LABELS)
        return Labels(tuple(map(str, kept.get("tags", ()))), str(kept.get("note", "")))
    return Labels()


def keep_labels(directory: Path, labels: Labels) -> None:
    """Keep labels in the folder of a run. Raises OSError when the disk does not take them."""
    write_json(directory / _LABELS, asdict(labels))
