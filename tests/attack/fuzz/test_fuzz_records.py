"""Whatever bytes come in the place of a rank's records, the reader raises ValueError or returns records that fit."""

from __future__ import annotations

import json
import struct
from array import array
from base64 import b64encode
from contextlib import suppress

import pytest

from attack.fuzz.fuzz import damaged, with_other_values
from ring_notebook.protocol.records import (
    Cleared,
    Display,
    Ended,
    Failure,
    Gradients,
    MetricBatch,
    Output,
    Record,
    Status,
    Trace,
    decode,
    encode,
)

COUNT = 2000
RECORDS: list[Record] = [
    MetricBatch("r", 0, ("loss",), array("d", (1.0, 1.0, 0.5, 2.0, 2.0, 0.25))),
    Output("r", 1, "stdout", "text é\n"),
    Display("r", 0, {"text/plain": "x"}, {}, "id", True),
    Cleared("r", 1),
    Status("r", 0, 1.5, 3, {"operation": "allreduce", "missing": [1]}, (1, 10), {"a": 1}),
    Failure("r", 1, "ValueError", "builtins", "bad", (("<cell>", 3, "f", "x = 1"),), "Traceback", False, "80"),
    Ended("r", 0, "ok", 1.5, {"samples": 3}),
    Gradients("r", 1, ("0.weight",), array("I", [0, 2**32 - 1])),
    Trace("r", 1, b'[{"name": "a"}]'),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.kind)
def test_damaged_bytes(record: Record) -> None:
    for data in damaged(encode([record, record]), COUNT, seed=12):
        with suppress(ValueError):
            encode(decode(data))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.kind)
def test_other_values(record: Record) -> None:
    """What is accepted can be sent on as it is."""
    accepted = 0
    for other in with_other_values(json.loads(encode([record]))):
        with suppress(ValueError):
            (read,) = decode(json.dumps(other).encode() + b"\n")
            encode([read])
            accepted += 1
    assert accepted, "a summary, a text or a name may be anything"


@pytest.mark.parametrize("body", [b"1234567", struct.pack("<4d", 1, 1, 1, 1), struct.pack("<3d", 1, float("nan"), 1)])
def test_rows_that_do_not_fit_their_names(body: bytes) -> None:
    fields = json.loads(encode([RECORDS[0]])) | {"values": b64encode(body).decode()}
    with pytest.raises(ValueError, match="record 0 of a message is invalid"):
        decode(json.dumps(fields).encode() + b"\n")
