"""A question that a rank asks its user, as it travels to the kernel."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ring_notebook.protocol.field_types import check_fields

QUESTIONS = "ring_question"
"""The key under which an engine publishes a question."""

CONTROL = "ring_request"
"""The type of messages with which the kernel calls a function of an engine while a cell runs there."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its ``prompt``; ``text`` is shown before it.

    ``number`` counts the questions of a rank. ``kind`` says what the answer is for: ``pdb`` takes commands, and a
    ``password`` is not shown. An empty kind withdraws the question, which has been answered or interrupted. With
    ``held`` a debugger has stopped the rank: no time limit of the run counts until the next message of the rank.
    """

    number: int
    prompt: str = ""
    text: str = ""
    kind: Literal["input", "password", "pdb", ""] = ""
    held: bool = False

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, message: str) -> Question:
        """The question of one message. Raises ValueError when it is not one of `encode`."""
        try:
            fields: dict[str, Any] = json.loads(message)
            check_fields(cls, fields)
            return cls(**fields)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"a question of a rank is invalid: {type(error).__name__}: {error}") from None
