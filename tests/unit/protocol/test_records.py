"""Records and questions: what a rank sends arrives as it was, and what is truncated or none is noticed."""

from __future__ import annotations

from array import array

import pytest

from ring_notebook.protocol.question import Question
from ring_notebook.protocol.records import (
    Change,
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

RECORDS: list[Record] = [
    MetricBatch("r1", 3, ("loss",), array("d", [1.5, 0, 0.25, 2.5, 1, float("inf")])),
    MetricBatch("r1", 0, (), array("d")),
    MetricBatch("r1", 0, ("a",), array("d", [0, 7, 1]), {"a": "m"}, {"samples": 56.0, "epoch": 2.0, "epoch_step": 4.0}),
    Output("r1", 1, "stderr", "größe \N{GRINNING FACE}\n"),
    Display("r1", 1, {"image/png": "iVBO", "application/json": {"a": [1]}}, {"image/png": {"width": 3}}, "here", True),
    Cleared("r1", 2),
    Status("r1", 0, 12.5, line=3, waiting={"op": "allreduce", "ranks": [1, 2]}, progress=(7, 100), extra={"a": 1}),
    Failure("r1", 2, "KeyError", "builtins", "'no'", (("<cell>", 4, "f", "x['no']"),), "Traceback ...", True, "80"),
    Ended("r1", 0, "interrupted", 3.25, {"loss": 0.5}),
    Gradients("r1", 1, ("logical rank 2", "0.weight"), array("I", [0, 1, 2, 1, 3, 2**32 - 1])),
    Trace("r1", 1, b'[{"ph": "X"}]'),
    Change("r1", 1, 2.0, 3, "set", {"lr": 0.1, "mode": "a"}, "me, panel", 5, 6),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_arrives_as_it_was(record: Record) -> None:
    assert decode(encode([record])) == [record]


def test_no_records_are_an_empty_message() -> None:
    assert encode([]) == b""
    assert decode(b"") == []


def test_several_keep_their_order_and_a_memoryview_is_read_like_bytes() -> None:
    assert decode(memoryview(encode(RECORDS))) == RECORDS


def test_not_a_number_survives() -> None:
    (batch,) = decode(encode([MetricBatch("r", 0, ("loss",), array("d", [0, 0, float("nan")]))]))
    assert isinstance(batch, MetricBatch)
    assert batch.values[2] != batch.values[2]


def test_rows_are_time_step_and_values() -> None:
    batch = MetricBatch("r", 0, ("loss",), array("d", [1, 2, 3, 4, 5, 6]))
    assert list(batch.rows()) == [(1, 2, 3), (4, 5, 6)]


@pytest.mark.parametrize("missing", [1, 3, 20])
def test_a_truncated_message_is_an_error(missing: int) -> None:
    message = encode(RECORDS)
    with pytest.raises(ValueError, match="truncated"):
        decode(message[:-missing])


def test_a_question_arrives_as_it_was() -> None:
    question = Question(3, "Name? \N{GRINNING FACE}", "before\n", "password", held=True)
    assert Question.decode(question.encode()) == question


@pytest.mark.parametrize(
    "message", ["", "[]", "{}", '{"number": "1"}', '{"number": 1, "kind": "other"}', '{"number": 1, "more": 2}']
)
def test_what_is_no_question_is_an_error(message: str) -> None:
    with pytest.raises(ValueError, match="a question of a rank is invalid"):
        Question.decode(message)
