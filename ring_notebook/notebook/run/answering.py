"""Shows the user what the ranks of a run ask, one question at a time, and sends the answers."""

from __future__ import annotations

import getpass
from _thread import interrupt_main
from collections.abc import Collection, Sequence
from contextlib import suppress
from threading import Lock
from time import monotonic, sleep
from typing import TYPE_CHECKING

from IPython.core.error import StdinNotImplementedError

from ring_notebook.question import Question

if TYPE_CHECKING:
    from ring_notebook.notebook.engines import Engines

__all__ = ["Answering"]

_RANK_SIDE = "ring_notebook.engine.debugging.dialogue"
# The rank that was answered last is asked before others: a user who steps through one rank stays with it.
_SECONDS_TO_STAY = 0.5
_SECONDS_TO_TAKE_BACK = 0.1
_NOBODY = "this front end cannot ask; set a variable in the notebook and `%ring push` it"


class Answering:
    """The questions of a run that wait for an answer, by rank. `put` may be called from any thread."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._lock = Lock()
        self._open: dict[int, Question] = {}
        self._held: set[int] = set()
        self._last = (-1, 0.0)  # the rank that was answered last, and when
        self._shown: tuple[int, int] | None = None  # rank and number of the question that the user sees
        self._taken_back = False

    def put(self, rank: int, message: str) -> None:
        """Take in a question of ``rank``, or that it takes its question back."""
        question = Question.decode(message)
        with self._lock:
            (self._held.add if question.held else self._held.discard)(rank)
            if question.kind:
                self._open[rank] = question
            else:
                self._open.pop(rank, None)
                self._take_back(rank)

    @property
    def waiting(self) -> Sequence[int]:
        """The ranks that wait for an answer."""
        with self._lock:
            return sorted(self._open)

    def held(self, ended: Collection[int]) -> bool:
        """Whether a rank that is none of ``ended`` waits for its user, so that no time limit counts."""
        with self._lock:
            return not self._held <= set(ended)

    def close(self) -> None:
        """The run has ended: its open question needs no answer."""
        with self._lock:
            for rank in list(self._open):
                del self._open[rank]
                self._take_back(rank)

    def _take_back(self, rank: int) -> None:
        if self._shown is not None and self._shown[0] == rank:
            self._taken_back = True
            interrupt_main()

    def answer_one(self) -> None:
        """Have the user answer a question, if one waits. Raises KeyboardInterrupt when the user interrupts instead."""
        with self._lock:
            rank = self._next()
            if rank is None:
                return
            question = self._open[rank]
            self._shown, self._taken_back = (rank, question.number), False
        line, trouble, taken_back = None, "", False
        try:
            line = _typed(f"rank {rank}", question)
        except EOFError:
            pass
        except StdinNotImplementedError:
            trouble = _NOBODY
        except KeyboardInterrupt:
            if not self._taken_back:
                self._open.pop(rank, None)  # the rank takes it back when the interrupt has reached it
                raise
            taken_back = True
        finally:
            with self._lock:
                self._shown = None
        if self._taken_back:
            if not taken_back:  # the interrupt that was to end the input arrives after it
                _swallow_interrupt()
            return
        with self._lock:
            self._open.pop(rank, None)
            self._last = (rank, monotonic())
        self._engines.submit_beside(f"{_RANK_SIDE}:answer", (question.number, line, trouble), [rank])

    def _next(self) -> int | None:
        last, since = self._last
        if last in self._open:
            return last
        return min(self._open, default=None) if monotonic() - since > _SECONDS_TO_STAY else None


def _typed(name: str, question: Question) -> str:
    """What the user types for a question of the rank called ``name``."""
    if question.text:
        print(question.text, end="")  # noqa: T201
    prompt = f"{name} {question.prompt}" if question.kind == "pdb" else f"{name}: {question.prompt}"
    return getpass.getpass(prompt) if question.kind == "password" else input(prompt)


def _swallow_interrupt() -> None:
    with suppress(KeyboardInterrupt):
        sleep(_SECONDS_TO_TAKE_BACK)
