"""Marks on the stderr of a job by which a rank of a foreign launcher says that it has started or ended."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass

__all__ = ["RankMark", "mark_rank", "parse_mark"]

_MOST = 1 << 30


@dataclass(frozen=True, slots=True)
class RankMark:
    """``rank`` has started, or ``ended``."""

    rank: int
    ended: bool


def mark_rank(mark: RankMark) -> None:
    """Write ``mark`` to this process's stderr, where the launcher finds it."""
    with contextlib.suppress(OSError):  # nobody reads any more, or the disk is full
        os.write(2, b"\x1e" + json.dumps(asdict(mark)).encode() + b"\x1e\n")


def parse_mark(body: bytes) -> RankMark | None:
    """The mark that a report holds; None when it holds something else."""
    try:
        mark = RankMark(**json.loads(body))
    except (ValueError, TypeError, RecursionError):
        return None
    is_mark = type(mark.rank) is int and type(mark.ended) is bool and 0 <= mark.rank < _MOST
    return mark if is_mark else None
