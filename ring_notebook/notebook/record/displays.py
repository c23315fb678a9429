"""What the ranks have displayed or logged as pictures: the newest, equal displays of several ranks as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from ring_notebook.protocol.records import LOGGED, MEDIA, Display

MOST = 20
_SLACK = 4  # times as much is kept as is shown
MOST_BYTES = 600_000  # so that a saved notebook stays small; a single larger display is kept all the same


class Logged(NamedTuple):
    """The kind (`records.MEDIA`), the name and the step of what a rank has shown with `ring.log`."""

    kind: str
    name: str
    step: int


def logged(display: Display | Displayed) -> Logged | None:
    """What `ring.log` was given; None for other displays, and for unknown metadata."""
    about = display.metadata.get(LOGGED)
    if not isinstance(about, dict) or about.get("kind") not in MEDIA:
        return None
    name, step = about.get("name"), about.get("step")
    return Logged(about["kind"], name, step) if isinstance(name, str) and isinstance(step, int) else None


class Displayed(NamedTuple):
    """A display that ``ranks`` show, as a notebook's output: ``data`` by MIME type.

    ``place`` (the number of the display on its first rank, and that rank) stays the same when the display is updated.
    ``printed``, by rank: how many pieces of all ranks' output had come when it displayed this.
    """

    place: tuple[int, int]
    ranks: tuple[int, ...]
    data: dict[str, Any]
    metadata: dict[str, Any]
    printed: Mapping[int, int]

    @property
    def nbytes(self) -> int:
        """Its approximate size in a message or a file."""
        return _size(self.data)

    @property
    def logged(self) -> Logged | None:
        """What `ring.log` was given; None for what a rank has displayed."""
        return logged(self)

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.data, self.metadata


@dataclass(slots=True)
class _Item:
    rank: int
    ordinal: int  # counts the displays of the rank since its last clear_output
    number: int  # counts all displays of the rank
    id: str
    data: dict[str, Any]
    metadata: dict[str, Any]
    printed: int


class Displays:
    """The newest displays of every rank, within a bound in bytes."""

    def __init__(self) -> None:
        self._items: list[_Item] = []
        self._ordinals: Counter[int] = Counter()
        self._numbers: Counter[int] = Counter()
        self._forgotten = 0
        self._nbytes = 0  # an upper bound of the bytes in memory

    def add(self, display: Display, printed: int) -> None:
        """Take in a display of a rank, or the update of one, after ``printed`` pieces of output of all ranks."""
        # Equal data of several ranks is shared, so that 128 ranks need no more memory than one.
        data = next((item.data for item in self._items if item.data == display.data), display.data)
        rank = display.rank
        is_logged = logged(display) is not None
        if display.update or is_logged:
            same = [item for item in self._items if (item.rank, item.id) == (rank, display.id)]
            for item in same:
                item.data, item.metadata = data, display.metadata
            if same or not is_logged:
                return
        self._ordinals[rank] += 1
        self._numbers[rank] += 1
        item = _Item(rank, self._ordinals[rank], self._numbers[rank], display.id, data, display.metadata, printed)
        self._items.append(item)
        # Dropped only beyond a multiple of the bounds: equal displays of other ranks need no space.
        self._nbytes += _size(data)
        if len(self._items) > _SLACK * MOST or self._nbytes > _SLACK * MOST_BYTES:
            kept = self._chosen(_SLACK)
            self._forgotten += len(self._items) - sum(map(len, kept))
            chosen = {id(item) for group in kept for item in group}
            self._items = [item for item in self._items if id(item) in chosen]
            self._nbytes = sum(_size(group[0].data) for group in kept)

    def clear(self, rank: int) -> None:
        """Forget the displays of ``rank``."""
        self._items = [item for item in self._items if item.rank != rank]
        self._ordinals[rank] = 0

    def visible(self) -> tuple[tuple[Displayed, ...], int]:
        """The current displays, in each rank's order, and how many older ones were dropped.

        The n-th display of one rank joins the n-th equal one of another.
        """
        groups = self._chosen()
        dropped = self._forgotten + len(self._items) - sum(map(len, groups))
        return tuple(sorted(map(_joined, groups), key=attrgetter("place"))), dropped

    def _chosen(self, times: int = 1) -> list[list[_Item]]:
        """Groups of equal items: the newest of every rank first, then the second newest, up to ``times`` the bounds."""

        def age(group: list[_Item]) -> tuple[int, int]:
            return min((self._numbers[item.rank] - item.number, item.rank) for item in group)

        seen: Counter[tuple[int, int]] = Counter()
        groups: dict[tuple[int, int], list[_Item]] = {}
        for item in self._items:
            seen[item.rank, id(item.data)] += 1
            groups.setdefault((id(item.data), seen[item.rank, id(item.data)]), []).append(item)
        chosen: list[list[_Item]] = []
        nbytes = 0
        for group in sorted(groups.values(), key=age)[: times * MOST]:
            nbytes += _size(group[0].data)
            if nbytes > times * MOST_BYTES and chosen:
                break
            chosen.append(group)
        return chosen


def _joined(items: list[_Item]) -> Displayed:
    first = min(items, key=attrgetter("ordinal", "rank"))
    printed = {item.rank: item.printed for item in sorted(items, key=attrgetter("rank"))}
    return Displayed((first.ordinal, first.rank), tuple(printed), first.data, first.metadata, printed)


def bundles(displays: Iterable[Display], of_log: bool = False) -> list[Displayed]:
    """All displays one by one, as a notebook shows them; with ``of_log`` what `ring.log` was given."""
    shown: Counter[int] = Counter()
    result = []
    for display in displays:
        if (logged(display) is not None) != of_log:
            continue
        shown[display.rank] += 1
        result.append(
            Displayed((shown[display.rank], display.rank), (display.rank,), display.data, display.metadata, {})
        )
    return result


def _size(data: dict[str, Any]) -> int:
    return sum(len(value) if isinstance(value, str) else len(repr(value)) for value in data.values())
