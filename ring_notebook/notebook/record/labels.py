"""Tags and a note that a person has given a run; kept in its folder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ring_notebook.notebook.record.run_files import read_json, write_json

__all__ = ["Labels", "keep_labels", "read_labels"]

_LABELS = "labels.json"


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
