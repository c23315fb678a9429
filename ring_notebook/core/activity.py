"""What the ranks of a group are doing and have done: waits, counts, times, recorded events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

if TYPE_CHECKING:
    from ring_notebook import _core

__all__ = ["Activity"]


class Activity:
    """The part of a group's communicator that looks at its operations and starts none."""

    rank: int
    """Index of this process in the group."""
    ranks: tuple[int, ...]
    """Global ranks of the members, in group order."""
    _native: _core.Communicator

    def __init__(self) -> None:
        self._children: list[ref[Activity]] = []

    def snapshot(self) -> list[dict[str, Any]]:
        """What every rank of the group is doing now; may be called from any thread at any time.

        One dict per rank: ``rank``, ``state`` ("idle", "waiting", "moving", "left"), ``operation``, ``name``,
        ``sequence``, ``seconds`` (in that state) and ``missing``, the ranks that it waits for. A rank that works in a
        smaller group is shown with what it does there. Of operations that it has started by name, this rank is shown
        with the one that has waited for longest; these have ``sequence`` 0.
        """
        entries = {entry["rank"]: entry for entry in _with_missing(self._native.activity())}
        own = self._named_wait()
        if own is not None and entries[own["rank"]]["state"] == "idle":
            entries[own["rank"]] = own
        for child in filter(None, [known() for known in self._children]):
            for entry in child.snapshot():
                if entry["state"] in ("waiting", "moving") and entry["rank"] in entries:
                    entries[entry["rank"]] = entry
        return list(entries.values())

    def _named_wait(self) -> dict[str, Any] | None:
        wait = self._native.named_wait()
        if wait is None:
            return None
        fields = ("operation", "name", "seconds", "missing")
        own = {"rank": self.ranks[self.rank], "state": "waiting", "sequence": 0}
        return {**own, **dict(zip(fields, wait, strict=True))}

    def named_counts(self) -> dict[str, int]:
        """What has become of operations that were started with a name, so far.

        ``names`` that all ranks had started, ``operations`` that carried them out (fewer where some were fused), and
        ``rounds`` in which the ranks agreed on them; the ``gates``, and the ``messages`` and ``bytes`` to other hosts,
        that this took.
        """
        fields = ("rounds", "names", "operations", "gates", "messages", "bytes")
        return dict(zip(fields, self._native.named_counts(), strict=True))

    def seconds_spent(self) -> tuple[float, float]:
        """How long callers of this rank have been in operations of the epoch, and the part before all had come."""
        return self._native.seconds_spent(), self._native.seconds_waited()

    def counts(self) -> dict[str, Any]:
        """What this rank has done so far in operations that match by order, since the group began.

        ``operations``, ``gates`` (barriers within its host), and what it has ``sent`` to each host as (messages,
        bytes), an empty list where all ranks share one.
        """
        return dict(zip(("operations", "gates", "sent"), self._native.counts(), strict=True))

    def record(self, capacity: int = 1 << 16) -> None:
        """Begin to note what operations of the epoch do; the newest ``capacity`` events are kept.

        Does nothing while a recording is under way. Raises ValueError for a capacity of 0.
        """
        self._native.record(capacity)

    def recorded(self, end: bool = True) -> list[tuple[int, int, str, str, str, int, int, int, int]]:
        """The events of the recording that have not been returned yet; with ``end`` it ends.

        Each is (begin, end, phase, operation, name, sequence, bytes, group, last): nanoseconds of the monotonic clock;
        the phases are "queued", "negotiating" (until all ranks had started the name), "packing", "waiting", "moving"
        (reducing too) and "sending"; ``group`` numbers the groups of the epoch, 0 being all ranks, with 65536 added for
        their operations by name; ``last`` is the global rank that came last to what was waited for, -1
        where nobody waited.
        """
        return self._native.recorded(end)


def _with_missing(activity: list[dict[str, Any]]) -> list[dict[str, Any]]:
    counts = {entry["rank"]: entry.pop("arrivals") for entry in activity}
    for entry in activity:
        waits = entry["state"] == "waiting"
        entry["missing"] = [rank for rank, count in counts.items() if waits and count < counts[entry["rank"]]]
    return activity
