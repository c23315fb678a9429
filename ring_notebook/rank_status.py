"""What a rank tells the launcher that started it: when it began, raised or left the job, and whom it went on without.

These are lines in a file that the launcher holds, because a rank's exit code does not tell an end from a flight.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field

from ring_notebook.config import config
from ring_notebook.errors import CollectiveAborted

__all__ = ["Life", "Told", "tell", "tell_end"]


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank has told so far: the time of each word, and the ranks of the job that it went on without."""

    times: dict[str, float] = field(default_factory=dict)
    without: frozenset[int] = frozenset()

    @property
    def aborted(self) -> bool:
        """Whether an exception has ended it that only says that another rank has ended."""
        return "aborted" in self.times

    @property
    def unfinished(self) -> bool:
        """Whether it has taken part in the job and never come to the end of its program."""
        return "begun" in self.times and "left" not in self.times

    def failed_at(self, code: int) -> float:
        """When it began to end with ``code``; 0 when it has not told.

        What ended it comes before what it does at its end, by which it may be later than those that it has aborted.
        """
        # Whoever dies of a signal after it has left may have done so long before: it waits for the others there.
        left = self.times.get("left", 0.0) if code > 0 else 0.0
        return self.times.get("raised") or self.times.get("aborted") or left


class Life:
    """The launcher's side, for one rank."""

    def __init__(self) -> None:
        self._file = os.memfd_create("life")  # no file that could be left behind

    @property
    def variables(self) -> dict[str, str]:
        """Those of the rank's environment that make it tell."""
        return {"RING_LIFE": f"/proc/{os.getpid()}/fd/{self._file}"}

    def read(self) -> Told:
        """What the rank has told so far. What its children tell, which have its environment, is not heard."""
        data = os.pread(self._file, os.fstat(self._file).st_size, 0).decode()
        lines = [line.split() for line in data.splitlines()]
        own = [words for pid, *words in lines if pid == lines[0][0]]
        times = {word: float(when) for word, when, *_ in own}
        return Told(times, frozenset(int(rank) for word, _, *ranks in own if word == "without" for rank in ranks))


def tell(word: str, *ranks: int) -> None:
    """Tell the launcher, if one listens, that this rank has "begun" or "left", or goes on "without" ``ranks``."""
    if not config().life:
        return
    with suppress(OSError), open(config().life, "a") as file:
        file.write(" ".join(map(str, (os.getpid(), word, time.time(), *ranks))) + "\n")


def tell_end(error: BaseException) -> None:
    """Tell the launcher that ``error`` ends this rank."""
    tell("aborted" if isinstance(error, CollectiveAborted) else "raised")
