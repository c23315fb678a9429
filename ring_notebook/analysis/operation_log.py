"""The last operations of every rank, read from the logs that the core keeps, and the first place where ranks part.

A log survives its rank: the launcher holds its file (`ring_notebook.rank.rank_status`). The core writes and parses it
(`native/include/ring/group/operation_log.hpp`). All but `read_log` are pure functions.
"""

from __future__ import annotations

import base64
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from ring_notebook.text.words import operation_title
from ring_notebook.text.words import ranks as named_ranks

OPERATION = "operation"
"""The category of an event that is one `Operation`, in a trace as ranks send it."""
PARTING = "parting"
"""The category of the event that says where ranks part."""

TRACE = "RING_TRACE_ON_ERROR"
"""Environment of a job: the file for a trace of the last operations, should it fail."""

MOST_BYTES = 1 << 20
"""More than a log has."""
_MOST_RANKS = 1 << 16
"""More than a group has: a log may be damaged."""
_MEMBERS = ("generation of ", "group of ")
"""How the notes begin that list the members of a group, as far as they have room."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation as one rank has called it. Times are nanoseconds of the wall clock, 0 for what has not happened.

    ``group`` is one number on all members, 0 for all ranks of ``generation``; ``sequence`` counts the operations of a
    group that match by order, and is 0 for those that match by name. ``state`` is "note" for what a rank says of
    itself, with the text in ``name``. ``line`` is where it was called; not known for operations that did not wait.
    """

    rank: int
    kind: str
    name: str
    what: str
    """Its reduction, dtype, shape or elements, and root: "sum float32 [3, 4]"."""
    nbytes: int
    group: int
    size: int
    generation: int
    sequence: int
    called: int
    arrived: int
    ended: int
    state: Literal["pending", "done", "failed", "note"]
    line: str = ""

    @property
    def title(self) -> str:
        """As errors name it: "allreduce 'grad'"."""
        return operation_title(self.kind, self.name)

    @property
    def full(self) -> str:
        """The title with all that ranks compare."""
        return f"{self.title} {self.what}".strip()

    @property
    def at(self) -> str:
        """Where it was called, to follow its title: " at train.py:12"; empty if unknown."""
        return f" at {self.line}" if self.line else ""


def read_log(path: str) -> bytes:
    """The log at ``path``; empty if it has gone with its owner."""
    try:
        with open(path, "rb") as file:
            return file.read(MOST_BYTES)
    except OSError:
        return b""


def pack(log: bytes) -> str:
    """A log as text, for `unpack`; some ten KiB."""
    return base64.b64encode(zlib.compress(log, 1)).decode()


def unpack(text: str) -> bytes:
    """The log in a text of `pack`. Raises ValueError for any other text."""
    try:
        return zlib.decompressobj().decompress(base64.b64decode(text), MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"a log of operations is invalid: {error}") from None


def parse(data: bytes, rank: int) -> list[Operation]:
    """The operations in a log of ``rank``, in the order in which they were called; none in what is no log."""
    if not data:  # the rank may have found no core to write one
        return []
    from ring_notebook._core import OperationLog

    return [Operation(rank, *fields) for fields in OperationLog.parse(data)]


def died(last: Operation) -> Operation:
    """The note that a rank has died, after the ``last`` one in its log."""
    when = max(last.called, last.ended)
    return replace(
        last, kind="note", name="has died", what="", state="note", called=when, arrived=when, ended=when, line=""
    )


def as_events(operations: Iterable[Operation]) -> list[dict[str, Any]]:
    """The operations in Chrome's trace format, one event each, for `complete`."""
    return [
        {
            "name": one.title,
            "cat": OPERATION,
            "ph": "i",
            "ts": one.called / 1000,
            "pid": one.rank,
            "tid": 0,
            "args": asdict(one),
        }
        for one in operations
    ]


def complete(events: Sequence[dict[str, Any]], ends: Mapping[int, str] | None = None) -> list[dict[str, Any]]:
    """``events`` with each event of `as_events` split into its wait and its movement, as in a timeline.

    Adds an event where ranks part, if they do; ``ends`` as in `parting`. Other events stay.
    """
    operations = [Operation(**one["args"]) for one in events if one.get("cat") == OPERATION]
    others = [one for one in events if one.get("cat") != OPERATION]
    if not operations:
        return others
    found = parting(operations, ends)
    last: dict[tuple[int, int, int], Operation] = {}
    now = max(max(one.called, one.arrived, one.ended) for one in operations)
    for one in operations:
        if one.arrived and one.sequence:
            key = one.generation, one.group, one.sequence
            last[key] = max(last.get(key, one), one, key=attrgetter("arrived"))
    groups = {number: index for index, number in enumerate(sorted({one.group for one in operations}))}
    made = []
    for one in operations:
        event = {"name": one.full, "ph": "X", "pid": one.rank, "tid": groups[one.group]}
        args = {"sequence": one.sequence, "bytes": one.nbytes, "state": one.state, "line": one.line}
        if one.state == "note":
            made.append({**event, "name": one.name, "cat": "note", "ph": "i", "s": "t", "ts": one.called / 1000})
            continue
        begin, end = one.arrived or one.called, one.ended or now
        latest = last.get((one.generation, one.group, one.sequence), one)
        met = min(max(begin, latest.arrived), end) if one.state == "done" else end
        times = {"ts": begin / 1000, "dur": (met - begin) / 1000}
        waited_for = latest.rank
        if found and one.state != "done" and found.missing and one.rank not in found.missing:
            waited_for = found.missing[0]
        made.append({**event, "cat": "waiting", **times, "args": {**args, "last to arrive": waited_for}})
        if end > met:
            made.append({**event, "cat": "moving", "ts": met / 1000, "dur": (end - met) / 1000, "args": args})
    if found:
        mark = {"name": found.text, "cat": PARTING, "ph": "X", "ts": found.when / 1000, "tid": 0}
        for rank in found.ranks:
            made.append({**mark, "dur": max(1000.0, (now - found.when) / 1000), "pid": rank, "args": {}})
    return [*others, *made]


@dataclass(frozen=True, slots=True)
class Parting:
    """The first place where ranks part: a sentence that names the ranks and the operation."""

    text: str
    when: int
    """Nanoseconds of the wall clock."""
    ranks: tuple[int, ...]
    """Those that did something else than the others."""
    missing: tuple[int, ...] = ()
    """Those of them that never came."""


def parting(operations: Sequence[Operation], ends: Mapping[int, str] | None = None) -> Parting | None:
    """Where the ranks part, if they do. ``ends``: how the processes of ranks have ended, "was killed by SIGKILL"."""
    newest = max((one.generation for one in operations), default=0)
    groups: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    for one in operations:
        if one.generation == newest or one.state == "failed":
            groups[one.generation, one.group].append(one)
    found = [
        candidate
        for key in groups
        for candidate in _candidates(
            [one for one in operations if (one.generation, one.group) == key], operations, dict(ends or {})
        )
    ]
    return min(found, key=attrgetter("when"), default=None)


def _candidates(group: Sequence[Operation], all_of_them: Sequence[Operation], ends: dict[int, str]) -> list[Parting]:
    members = _members(group)
    ordered: dict[int, dict[int, Operation]] = defaultdict(dict)
    named: dict[str, dict[int, Operation]] = defaultdict(dict)
    for one in group:
        if one.state == "note":
            continue
        if one.sequence:
            ordered[one.sequence][one.rank] = one
        elif one.name:
            named[one.name][one.rank] = one  # its last one
    found = []
    cut: dict[int, Operation] = {}  # failed calls of an operation that other ranks have completed: its cause came later
    oldest = {rank: min((n for n, calls in ordered.items() if rank in calls), default=0) for rank in members}
    for sequence in sorted(ordered):
        calls = ordered[sequence]
        if any(sequence < oldest[rank] for rank in members):  # some logs have overwritten it
            continue
        if {one.state for one in calls.values()} != {"done"}:
            # After an abort an operation fails before it gets a sequence.
            alike = {one.full for one in calls.values()}
            late = {one.rank: one for one in group if not one.sequence and one.state == "failed" and one.full in alike}
            calls = {**late, **calls}
            if not cut and len(alike) == 1 and calls.keys() == set(members) and any(map(_is_done, calls.values())):
                cut = {rank: one for rank, one in calls.items() if not _is_done(one)}
                continue
            found.append(_describe(calls, [rank for rank in members if rank not in cut], all_of_them, ends))
            break
    if cut and not found:
        found.append(_describe_cut(cut, members, all_of_them, ends))
    if not found:  # what matches by name ends with the generation, so it says less
        for calls in named.values():
            open_calls = {rank: one for rank, one in calls.items() if one.state != "done"}
            if open_calls:
                found.append(_describe(open_calls, members, all_of_them, ends))
    return found


def _is_done(one: Operation) -> bool:
    return one.state == "done"


def _members(group: Sequence[Operation]) -> list[int]:
    """The ranks of the group, as far as their logs tell."""
    for one in group:
        if one.state == "note" and one.name.startswith(_MEMBERS):
            _, _, listed = one.name.partition(" of ")
            numbers = [int(word) for word in listed.split() if word.isdigit()]
            if len(numbers) == one.size:
                return numbers
    known = {one.rank for one in group}
    size = max(one.size for one in group)
    return sorted(known | set(range(size)) if group[0].group == 0 and size <= _MOST_RANKS else known)


def _describe(
    calls: Mapping[int, Operation], members: Sequence[int], everything: Sequence[Operation], ends: Mapping[int, str]
) -> Parting:
    missing = [rank for rank in members if rank not in calls]
    texts = Counter(one.full for one in calls.values())
    usual, most = texts.most_common(1)[0]
    if len(texts) > 1 and most == 1:  # two ranks that differ, say: the lower one is the measure
        usual = calls[min(calls)].full
    first = next(one for one in calls.values() if one.full == usual)
    when = min(one.arrived or one.called for one in calls.values())
    others = [rank for rank, one in calls.items() if one.full == usual]
    odd = {rank: one for rank, one in sorted(calls.items()) if one.full != usual}
    which = f" ({_group_of(members)})" if first.group else ""
    if odd:
        said = "; ".join(f"rank {rank} called {one.full}{one.at}" for rank, one in odd.items())
        text = f"{said}, where {named_ranks(sorted(others))} called {first.full}{first.at}{which}"
        return Parting(text, when, tuple(odd))
    if missing:
        stories = "; ".join(_story(rank, everything, ends, when) for rank in missing)
        text = f"{stories}. {named_ranks(sorted(others))} called {first.full}{first.at}{which}"
        return Parting(text, when, tuple(missing), tuple(missing))
    ended = {rank: how for rank, how in ends.items() if rank in calls}
    if ended:
        said = "; ".join(f"rank {rank} {how} in {calls[rank].full}{calls[rank].at}" for rank, how in ended.items())
        return Parting(said + which, when, tuple(sorted(ended)))
    failed = tuple(sorted(rank for rank, one in calls.items() if one.state != "done"))
    how = "failed in" if any(one.state == "failed" for one in calls.values()) else "are in"
    return Parting(f"{named_ranks(list(failed))} {how} {first.full}{first.at}{which}", when, failed)


def _describe_cut(
    calls: Mapping[int, Operation], members: Sequence[int], everything: Sequence[Operation], ends: Mapping[int, str]
) -> Parting:
    """Ranks that failed in an operation which the others have completed: the text says what these did after it."""
    first = next(iter(calls.values()))
    when = min(one.arrived or one.called for one in calls.values())
    stories = {rank: _end_of(rank, everything, ends) for rank in members if rank not in calls}
    told = {rank: what for rank, what in stories.items() if what} or dict.fromkeys(stories, "went on")
    text = "; ".join(f"rank {rank} {what}" for rank, what in told.items())
    which = f" ({_group_of(members)})" if first.group else ""
    return Parting(
        f"{text} after {first.full}{first.at}, which {named_ranks(sorted(calls))} had not completed{which}",
        when,
        tuple(told),
    )


def _group_of(members: Sequence[int]) -> str:
    return f"group of {named_ranks(list(members))}"


def _end_of(rank: int, everything: Sequence[Operation], ends: Mapping[int, str]) -> str:
    """How ``rank`` has ended, or what it said of itself after its last call; empty where nothing is known."""
    if rank in ends:
        return ends[rank]
    own = [one for one in everything if one.rank == rank]
    calls = [one for one in own if one.state != "note"]
    notes = [one for one in own if one.state == "note" and not one.name.startswith(_MEMBERS)]
    return next((one.name + one.at for one in notes if not calls or one.called >= calls[-1].called), "")


def _story(rank: int, everything: Sequence[Operation], ends: Mapping[int, str], when: int) -> str:
    """Why ``rank`` never came, as far as its log tells."""
    own = [one for one in everything if one.rank == rank]
    after = ""
    if calls := [one for one in own if one.state != "note"]:
        last = calls[-1]
        passed = (when - (last.ended or last.called)) / 1e9
        ago = f", {passed:.1f} s before" if passed >= 0.1 else ""
        after = f" after {last.title}{last.at}{ago}"
    if what := _end_of(rank, everything, ends):
        return f"rank {rank} never came: it {what}{after}"
    if not own:
        return f"rank {rank} never came, and its log is not known"
    return f"rank {rank} never came: its program has called nothing{after}"
