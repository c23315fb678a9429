"""Shows the user what the ranks of a run ask, one question at a time, and sends the answers.

The questions of a run that another kernel has sent arrive there; here the ranks are asked for them.
"""

from __future__ import annotations

import getpass
from _thread import interrupt_main
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from threading import Lock
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from IPython.core.error import StdinNotImplementedError

from ring_notebook.protocol.question import Question
from ring_notebook.text.words import first_characters
from ring_notebook.text.words import ranks as rank_text

if TYPE_CHECKING:
    from ring_notebook.notebook.engines import Engines

_RANK_SIDE = "ring_notebook.engine.dialogue"
# The rank that was answered last is asked before others: a user who steps through one rank stays with it.
_SECONDS_TO_STAY = 0.5
_SECONDS_TO_TAKE_BACK = 0.1
_SECONDS_BETWEEN_POLLS = 0.5
_LONGEST = 60  # characters of a prompt in a sentence
_NOBODY = "this front end cannot ask; set a variable in the notebook and `%ring push` it"


class Answering:
    """The questions of a run that wait for an answer, by rank. `put` may be called from any thread.

    With ``polls`` no question arrives by itself: another kernel has sent the run.
    """

    def __init__(self, engines: Engines, polls: bool = False) -> None:
        self._engines = engines
        self._polling = polls
        self._lock = Lock()
        self._open: dict[int, Question] = {}
        self._held: set[int] = set()
        self._last = (-1, 0.0)  # the rank that was answered last, and when
        self._shown: tuple[int, int] | None = None  # rank and number of the question that the user sees
        self._taken_back = False
        self._answered: dict[int, int] = {}  # by rank, the number of the question
        self._attended = False  # the user is at a prompt, or where the next one appears
        self._held_there = False  # whether the ranks were told to suspend time limits
        self._polls: dict[int, Future[Any]] = {}
        self._polled = 0.0

    def put(self, rank: int, message: str) -> None:
        """Take in a question of ``rank``, or that it takes its question back."""
        question = Question.decode(message)
        with self._lock:
            (self._held.add if question.held else self._held.discard)(rank)
            if question.kind:
                if question.number > self._answered.get(rank, 0):  # a poll may repeat an answered question
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
        """Whether a rank that has not ``ended`` waits for its user, which suspends time limits."""
        with self._lock:
            return not self._held <= set(ended)

    @contextmanager
    def attended(self) -> Iterator[None]:
        """While the block runs, questions are shown to the user by `answer_one`."""
        self._attended = True
        try:
            yield
        finally:
            self._attended = False

    def sentence(self) -> str:
        """The questions of ranks that nobody answers, and what to do; empty if there are none."""
        with self._lock:
            asking = [] if self._attended else list(self._open.items())
        prompts = [(rank, first_characters(question.prompt.strip(), _LONGEST)) for rank, question in asking]
        text = "; ".join(f"{rank_text([rank])} asks '{prompt}'" for rank, prompt in prompts)
        return f"{text}: `%ring debug` answers." if text else ""

    def poll(self) -> None:
        """Ask the ranks now and then for their questions, if these do not arrive by themselves; returns at once."""
        if not self._polling or monotonic() - self._polled < _SECONDS_BETWEEN_POLLS:
            return
        self._polled = monotonic()
        for rank, future in list(self._polls.items()):
            if future.done():
                del self._polls[rank]
                if message := future.result()["content"].get("result"):
                    self.put(rank, message)
        free = [rank for rank in self._engines.living() if rank not in self._polls]
        self._polls.update(zip(free, self._engines.submit_beside(f"{_RANK_SIDE}:state", (), free), strict=True))

    def refresh(self) -> None:
        """Ask the ranks for their questions, where these do not arrive by themselves; at most 2 seconds."""
        living = self._engines.living() if self._polling else []
        for rank, message in zip(living, self._engines.call_beside(f"{_RANK_SIDE}:state", ranks=living), strict=True):
            if message:
                self.put(rank, message)

    def pass_on_hold(self, ended: Collection[int]) -> None:
        """Have the ranks suspend time limits of collectives while one that has not ``ended`` waits for its user."""
        if (held := self.held(ended)) != self._held_there:
            self._held_there = held
            living = [] if self._engines.trouble() else self._engines.living()
            self._engines.submit_beside(f"{_RANK_SIDE}:hold", (held,), living)

    def close(self) -> None:
        """The run has ended: its open question needs no answer."""
        self.pass_on_hold(range(len(self._engines.all)))
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
                with suppress(KeyboardInterrupt):
                    sleep(_SECONDS_TO_TAKE_BACK)
            return
        with self._lock:
            self._open.pop(rank, None)
            self._last = (rank, monotonic())
            self._answered[rank] = question.number
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
