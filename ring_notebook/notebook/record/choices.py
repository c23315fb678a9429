"""What a person has set on a run: how its charts look, its tags and its note; kept in its folder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

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
