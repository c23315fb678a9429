"""The records that a rank sends to the kernel: metrics, output, displays, status, load, gradients, failure, end, trace.

A message has a line of JSON for each record. The numbers of metrics (float64) and the events of a trace are in base64,
because a float as text takes thirty times as long to write and read. A journal is a file of messages, each after a
line with its time (`stamped`). Kernel side and rank side both use this module, and no code of each other.
"""

from __future__ import annotations

import json
import math
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

from ring_notebook.protocol.field_types import check_fields

RECORDS = "ring_records"
"""The key under which an engine publishes a message of records."""
PROGRAM = 1 << 17
"""The thread of a trace that shows what the program of a rank waits for; the other threads are groups."""
TRAINING = "training"
"""The kind of two events of that thread. A rank trains between them: from its first row to the end of its cell."""
COUNTED = "counted"
"""The kind of events with what a rank has counted until then, by the names of `time_breakdown.OwnTime` and of links."""


MEDIA = ("image", "figure", "histogram", "text")
"""What `ring.log` takes beside numbers. Each is a `Display` whose metadata has ``LOGGED``: its kind, name and step."""
LOGGED = "ring_logged"
HISTOGRAM = "application/vnd.ring-histogram+json"
"""The type of the numbers of a histogram: ``counts``, and one more ``edges``."""

SET, PAUSE, RESUME, SNAPSHOT = "set", "pause", "resume", "snapshot"
"""What a `Change` does."""


@dataclass(frozen=True, slots=True)
class _OfRank:
    """Every record is of one rank in one run."""

    kind: ClassVar[str]
    run: str
    rank: int


@dataclass(frozen=True, slots=True)
class MetricBatch(_OfRank):
    """Rows that one rank logged with the same metrics.

    ``values`` holds the rows one after another, ``width`` float64 each: time (seconds since the epoch), step, and the
    value of each metric in the order of ``names``. A metric may have any name, ``time`` included. ``units`` are those
    that the rank has given to some of them since its last batch. ``earlier``, in the first batch of a run that
    continues another one: the ``samples`` of this rank until then, and the ``epoch`` in progress with its first step,
    ``epoch_step``.
    """

    kind = "metrics"
    names: tuple[str, ...]
    values: array[float]
    units: dict[str, str] = field(default_factory=dict)
    earlier: dict[str, float] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Numbers per row: time, step and one for each name."""
        return len(self.names) + 2

    def rows(self) -> Iterator[tuple[float, ...]]:
        """The rows one by one: time, step, values."""
        width = self.width
        return (tuple(self.values[i : i + width]) for i in range(0, len(self.values), width))


@dataclass(frozen=True, slots=True)
class Output(_OfRank):
    """What a rank printed since its last Output. With ``block``: the lines of one call of print."""

    kind = "output"
    stream: Literal["stdout", "stderr"]
    text: str
    block: bool = False


@dataclass(frozen=True, slots=True)
class Display(_OfRank):
    """A figure, a table or another object that a rank has displayed.

    ``data`` (by MIME type, pictures in base64) and ``metadata`` are those of a Jupyter message. With ``update`` it
    replaces the display of the rank with the same ``id``.
    """

    kind = "display"
    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    update: bool = False


@dataclass(frozen=True, slots=True)
class Cleared(_OfRank):
    """A rank has called ``clear_output``: what it printed and displayed before is no longer shown."""

    kind = "cleared"


@dataclass(frozen=True, slots=True)
class Status(_OfRank):
    """What a rank is doing, sent about once a second.

    ``line`` is the line of the cell (from 1) that its main thread executes, 0 when unknown. ``waiting`` describes the
    collective that it is in: operation, name, sequence, seconds, and the missing ranks. ``progress`` is
    ``(done, total)`` in steps, total 0 when unknown.
    """

    kind = "status"
    time: float
    line: int = 0
    waiting: dict[str, Any] | None = None
    progress: tuple[int, int] = (0, 0)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure(_OfRank):
    """An exception that ended a rank's cell.

    ``ename`` and ``module`` name its type. ``pickled`` is the pickled exception in hex, or empty if it cannot be
    pickled. ``frames`` are (file, line, function, source line) from the cell inwards; frames of the cell have the file
    ``<cell>``. ``aborted``: this rank stopped because another one failed.
    """

    kind = "failure"
    ename: str
    module: str
    message: str
    frames: tuple[tuple[str, int, str, str], ...]
    traceback: str
    aborted: bool = False
    pickled: str = ""


@dataclass(frozen=True, slots=True)
class Ended(_OfRank):
    """The last record of a rank in a run; for a rank that has ``died`` the notebook writes it."""

    kind = "ended"
    status: Literal["ok", "failed", "aborted", "interrupted", "died"]
    seconds: float
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load(_OfRank):
    """What a rank's process, those that it has started, and its machine did in the last second or two.

    ``values`` by name: ``cpu`` and ``gpu`` in percent (of one core, of the device), ``memory`` and ``gpu_memory`` in
    bytes in use, ``memory_left`` and ``gpu_memory_left`` in bytes, ``disk`` and ``network`` in bytes a second,
    ``threads`` that the rank computes with. Unknown values are left out. ``memory_expected`` or
    ``gpu_memory_expected``: what memory in use will grow to, if the cell has asked for it (`ring.memory`).
    """

    kind = "load"
    time: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Params(_OfRank):
    """All hyper-parameters of a rank so far: numbers, strings and booleans by name."""

    kind = "params"
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class KnobRecord(_OfRank):
    """A knob that a rank has made, with its first value; ``range`` is what `knobs.encoded` makes of its range."""

    kind = "knob"
    name: str
    value: Any
    range: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Change(_OfRank):
    """A change of knobs, or a pause or its end (``action``), as one rank has taken it.

    ``number`` counts the changes of a run from 1; those that are due at a point count down from -1. ``who`` has made
    it. ``point`` is the number of steps that all ranks had committed to then; ``step``, in the numbers of this rank's
    rows, is the first with the change.
    """

    kind = "change"
    time: float
    number: int
    action: Literal["set", "pause", "resume"]
    values: dict[str, Any]
    who: str
    point: int
    step: int


@dataclass(frozen=True, slots=True)
class Gradients(_OfRank):
    """Marks of the gradients of logical ranks, by which two runs are compared bit by bit.

    ``values`` holds rows of unsigned 32 bits: the step, from 0, and for each of ``names`` a mark of the average of that
    parameter, or of all gradients of that logical rank. A rank marks a part of the parameters.
    """

    kind = "gradients"
    names: tuple[str, ...]
    values: array[int]

    def rows(self) -> Iterator[tuple[int, ...]]:
        """The rows one by one: step, marks."""
        width = len(self.names) + 1
        return (tuple(self.values[i : i + width]) for i in range(0, len(self.values), width))


@dataclass(frozen=True, slots=True)
class Trace(_OfRank):
    """What a rank did during a run with ``--timeline``, or the last operations of a failed rank.

    ``events`` is a JSON array of events in Chrome's trace format, as bytes; the kernel stores it without reading it.
    """

    kind = "trace"
    events: bytes


Record = (
    MetricBatch
    | Output
    | Display
    | Cleared
    | Status
    | Load
    | Params
    | KnobRecord
    | Change
    | Gradients
    | Failure
    | Ended
    | Trace
)
_KINDS: dict[str, type[Any]] = {cls.kind: cls for cls in get_args(Record)}
_MOST_BYTES = 1 << 20


def encode(records: Sequence[Record]) -> bytes:
    """One message from several records, in order."""
    return b"".join(map(_line, records))


def _line(record: Record) -> bytes:
    named = {one.name: getattr(record, one.name) for one in fields(record)}
    return json.dumps({"kind": record.kind, **named}, default=_packed).encode() + b"\n"


def _packed(value: array[Any] | bytes) -> str:
    if not isinstance(value, array | bytes):
        raise TypeError(f"a record cannot hold an object of {type(value).__name__}")
    return b64encode(value).decode()


def stamped(message: bytes, now: float) -> bytes:
    """A message with its time, for a journal; ``now`` is in seconds since the epoch."""
    return b'{"time": %.6f}\n%b' % (now, message)


def messages(records: Sequence[Record]) -> Iterator[bytes]:
    """The records in order, in messages of at most about a megabyte, or of one larger record."""
    parts: list[bytes] = []
    size = 0
    for record in records:
        part = _line(record)
        if parts and size + len(part) > _MOST_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
        parts.append(part)
        size += len(part)
    if parts:
        yield b"".join(parts)


def decode(message: bytes | memoryview) -> list[Record]:
    """The records of one message. Raises ValueError when it is truncated or does not come from `encode`."""
    *lines, rest = bytes(message).split(b"\n")
    if rest:
        raise ValueError(f"record message of {len(message)} bytes is truncated")
    records: list[Record] = []
    for line in lines:
        try:
            records.append(_record(json.loads(line)))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"record {len(records)} of a message is invalid: {reason}") from None
    return records


def _record(named: dict[str, Any]) -> Record:
    """A record from its line. Raises various errors when the line does not come from `encode`."""
    cls = _KINDS[named.pop("kind")]
    if cls in (MetricBatch, Gradients):
        values: array[Any] = array("d" if cls is MetricBatch else "I")
        values.frombytes(b64decode(named["values"]))
        named["names"] = tuple(named["names"])
        named["values"] = values
    elif cls is Trace:
        named["events"] = b64decode(named["events"])
    elif cls is Failure:
        named["frames"] = tuple(tuple(frame) for frame in named["frames"])
    elif cls is Status:
        named["progress"] = tuple(named["progress"])
    check_fields(cls, named)
    record: Record = cls(**named)
    if isinstance(record, MetricBatch):
        _check_rows(record)
    elif isinstance(record, Gradients) and len(record.values) % (len(record.names) + 1):
        raise ValueError(f"expected rows of {len(record.names) + 1} numbers, got {len(record.values)} numbers")
    return record


def _check_rows(batch: MetricBatch) -> None:
    if len(batch.values) % batch.width or not all(map(math.isfinite, batch.values[1 :: batch.width])):
        raise ValueError(f"expected rows of {batch.width} numbers with finite steps, got {len(batch.values)} numbers")
