"""What crosses from a rank to the kernel: metric batches, output, displays, status, how a rank ended.

A record travels as one binary message: a JSON header, and behind it the numbers of metrics as raw float64 or the
events of a trace.
Both islands import this module and nothing else of one another.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from ring_notebook.field_types import check_fields

__all__ = [
    "RECORDS",
    "Cleared",
    "Display",
    "Ended",
    "Failure",
    "MetricBatch",
    "Output",
    "Record",
    "Status",
    "Trace",
    "decode",
    "encode",
]

RECORDS = "ring_records"
"""The key under which an engine publishes a message of records."""


@dataclass(frozen=True, slots=True)
class MetricBatch:
    """Rows that one rank logged with the same set of names.

    ``columns`` is ``("time", "step", *names)``: seconds since the epoch, step count, then the values. ``values``
    holds the rows one after another, ``len(columns)`` float64 each.
    """

    kind: ClassVar[str] = "metrics"
    run: str
    rank: int
    columns: tuple[str, ...]
    values: array[float]

    def rows(self) -> list[tuple[float, ...]]:
        """The rows as tuples in the order of ``columns``."""
        width = len(self.columns)
        return [tuple(self.values[i : i + width]) for i in range(0, len(self.values), width)]


@dataclass(frozen=True, slots=True)
class Output:
    """What a rank printed since its last Output: a delta, never republished."""

    kind: ClassVar[str] = "output"
    run: str
    rank: int
    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, slots=True)
class Display:
    """Something richer than text that a rank has shown: a figure, a table, what ``display`` was given.

    ``data`` is what it is by MIME type, pictures in base64, and ``metadata`` says more about it, both as Jupyter's
    messages carry them. With ``update`` it takes the place of what the rank has shown under the same ``id``.
    """

    kind: ClassVar[str] = "display"
    run: str
    rank: int
    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    update: bool = False


@dataclass(frozen=True, slots=True)
class Cleared:
    """A rank has taken back what it printed and showed before (``clear_output``)."""

    kind: ClassVar[str] = "cleared"
    run: str
    rank: int


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank is doing, sent every second or so and whenever asked.

    ``line`` is the line of the cell (from 1) that its main thread is at, 0 when unknown. ``waiting`` describes the
    collective it is in: operation, name, sequence, seconds, and the ranks that are missing. ``progress`` is
    ``(done, total)`` in steps, total 0 when unknown.
    """

    kind: ClassVar[str] = "status"
    run: str
    rank: int
    time: float
    line: int = 0
    waiting: dict[str, Any] | None = None
    progress: tuple[int, int] = (0, 0)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended a rank's cell.

    ``ename`` and ``module`` name its type, ``pickled`` is the exception itself where it could be pickled (hex), else
    empty. ``frames`` are (file, line, function, source line) from the cell inwards; the cell's own frames have the
    file ``<cell>``. ``aborted`` is true when this rank only stopped because another one failed.
    """

    kind: ClassVar[str] = "failure"
    run: str
    rank: int
    ename: str
    module: str
    message: str
    frames: tuple[tuple[str, int, str, str], ...]
    traceback: str
    aborted: bool = False
    pickled: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """The last record of a rank in a run."""

    kind: ClassVar[str] = "ended"
    run: str
    rank: int
    status: Literal["ok", "failed", "aborted", "interrupted"]
    seconds: float
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """What a rank did in a run that is recorded for a timeline.

    ``events`` is a JSON array of events in Chrome's trace format, as bytes: the kernel keeps them and looks into them
    only when somebody asks.
    """

    kind: ClassVar[str] = "trace"
    run: str
    rank: int
    events: bytes


Record = MetricBatch | Output | Display | Cleared | Status | Failure | Ended | Trace
_KINDS: dict[str, type[Any]] = {
    cls.kind: cls for cls in (MetricBatch, Output, Display, Cleared, Status, Failure, Ended, Trace)
}
_LENGTH = struct.Struct("<I")


def encode(records: Sequence[Record]) -> bytes:
    """One message from several records, in order."""
    parts: list[bytes] = []
    for record in records:
        body = b""
        if isinstance(record, MetricBatch):
            fields = {"run": record.run, "rank": record.rank, "columns": record.columns}
            body = record.values.tobytes()
        elif isinstance(record, Trace):
            fields = {"run": record.run, "rank": record.rank}
            body = record.events
        else:
            fields = asdict(record)
        header = json.dumps({"kind": record.kind, **fields}).encode()
        parts += [_LENGTH.pack(len(header)), header, _LENGTH.pack(len(body)), body]
    return b"".join(parts)


def decode(message: bytes | memoryview) -> list[Record]:
    """The records of one message. Raises ValueError when it is cut short, or is no message of `encode`."""
    data = bytes(message)
    records: list[Record] = []
    position = 0

    def take() -> bytes:
        nonlocal position
        if position + _LENGTH.size > len(data):
            raise ValueError(f"record message of {len(data)} bytes is cut short at byte {position}")
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size + length
        if position > len(data):
            raise ValueError(f"record message of {len(data)} bytes is cut short: needs {position}")
        return data[position - length : position]

    while position < len(data):
        header, body = take(), take()
        try:
            records.append(_record(json.loads(header), body))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"record {len(records)} of a message is invalid: {reason}") from None
    return records


def _record(fields: dict[str, Any], body: bytes) -> Record:
    """A record from its header and body. Raises various errors when they are none of `encode`'s."""
    cls = _KINDS[fields.pop("kind")]
    if cls is MetricBatch:
        values = array("d")
        values.frombytes(body)
        fields["columns"] = tuple(fields["columns"])
        fields["values"] = values
    elif cls is Trace:
        fields["events"] = body
    elif cls is Failure:
        fields["frames"] = tuple(tuple(frame) for frame in fields["frames"])
    elif cls is Status:
        fields["progress"] = tuple(fields["progress"])
    check_fields(cls, fields)
    record: Record = cls(**fields)
    if isinstance(record, MetricBatch):
        _check_rows(record)
    return record


def _check_rows(batch: MetricBatch) -> None:
    width = len(batch.columns)
    if width < 2 or len(batch.values) % width or not all(map(math.isfinite, batch.values[1::width])):
        raise ValueError(f"{len(batch.values)} numbers for {width} columns, or a step that is no number")
