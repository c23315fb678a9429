"""A question of a rank arrives as it was, and what is none is an error."""

from __future__ import annotations

import pytest

from ring_notebook.protocol.question import Question


def test_arrives_as_it_was() -> None:
    question = Question(3, "Name? \N{GRINNING FACE}", "before\n", "password", held=True)
    assert Question.decode(question.encode()) == question


@pytest.mark.parametrize(
    "message", ["", "[]", "{}", '{"number": "1"}', '{"number": 1, "kind": "other"}', '{"number": 1, "more": 2}']
)
def test_what_is_no_question_is_an_error(message: str) -> None:
    with pytest.raises(ValueError, match="a question of a rank is invalid"):
        Question.decode(message)
