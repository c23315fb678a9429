"""When and where an elastic job starts more ranks: which hosts have slots, and which rest after a failure."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from math import inf
from threading import Thread
from typing import NamedTuple

from ring_notebook.machine.os_calls import Wake

_MOST = 1 << 16
_PAUSE = 1.0  # seconds between two runs of the script that names the hosts


@dataclass(frozen=True, slots=True)
class Elastic:
    """The rules of an elastic job, which continues while ``min_np`` ranks are left; 0 for a job that is not elastic.

    It grows if there is a ``max_np`` or a ``script`` that names the hosts: to so many ranks, 0 for as many as there are
    slots. ``slots`` are those of hosts that the script names without a number. ``cooldown``: the seconds for which a
    host rests after its first failure, and at most. ``patience``: the seconds that the job waits while too few ranks
    are left.
    """

    min_np: int = 0
    max_np: int = 0
    script: str = ""
    slots: int = 1
    cooldown: tuple[float, float] = (1.0, 60.0)
    patience: float = 600.0

    @property
    def grows(self) -> bool:
        """Whether ranks join while the job runs."""
        return bool(self.max_np or self.script)

    def most(self, n: int) -> int:
        """The number of ranks that prefixes of lines have room for, in a job that begins with ``n``."""
        return max(n, self.max_np or (_MOST if self.script else 0))

    def __str__(self) -> str:
        """As `parse` takes it."""
        return json.dumps(asdict(self)) if self.grows else str(self.min_np)

    @classmethod
    def parse(cls, text: str) -> Elastic:
        """What `str` has made, or a number, which is the ``min_np``."""
        if text.isdigit():
            return cls(int(text))
        given = json.loads(text)
        return cls(**{**given, "cooldown": tuple(given["cooldown"])})


NOT_ELASTIC = Elastic()
"""The rules of a job that ends with the first failure."""


class Rest(NamedTuple):
    """A host gets no rank before ``until``, ``seconds`` after it has failed."""

    until: float
    seconds: float


class Growth:
    """What is known of the hosts of a job: their ``slots`` by name, and which rest."""

    def __init__(self, rules: Elastic, slots: Mapping[str, int]) -> None:
        self.slots = dict(slots)
        self._rules = rules
        self._rests: dict[str, Rest] = {}

    def fail(self, host: str, now: float) -> float:
        """A rank has failed on ``host``, which rests; returns for how many seconds.

        Twice as long as the last time, if that was not long ago.
        """
        least, most = self._rules.cooldown
        until, seconds = self._rests.get(host, Rest(-inf, 0.0))
        if now >= until:  # else other ranks have failed there just now
            seconds = min(most, 2 * seconds) if now - until < most else least
            self._rests[host] = Rest(now + seconds, seconds)
        return self._rests[host].until - now

    def due(self, running: Mapping[int, str], now: float) -> dict[int, str]:
        """The ranks to start now, with their hosts, beside those that are ``running``. They get the lowest numbers."""
        room = self._rules.max_np - len(running) if self._rules.max_np else len(running) + sum(self.slots.values())
        numbers = (rank for rank in count() if rank not in running)
        found: dict[int, str] = {}
        for host, slots in self.slots.items():
            if self._rests.get(host, Rest(-inf, 0.0)).until <= now:
                used = sum(where == host for where in running.values())
                found |= {next(numbers): host for _ in range(min(slots - used, room - len(found)))}
        return found

    def surplus(self, running: Mapping[int, str]) -> set[int]:
        """The ranks of ``running`` for which there is no slot any more; of each host the last ones."""
        by_host: dict[str, list[int]] = {}
        for rank, host in sorted(running.items()):
            by_host.setdefault(host, []).append(rank)
        return {rank for host, ranks in by_host.items() for rank in ranks[self.slots.get(host, 0) :]}


class Discovery(Thread):
    """Calls ``ask`` for the current hosts once a second; ``say`` gets each new reason why that fails."""

    def __init__(self, ask: Callable[[], Mapping[str, int]], say: Callable[[str], None]) -> None:
        super().__init__(name="ring-discovery", daemon=True)
        self.changed = Wake()
        """Readable when ``slots`` have changed."""
        self.slots: dict[str, int] = {}
        """The last answer."""
        self._ask = ask
        self._say = say

    def run(self) -> None:
        problem = ""
        while True:
            time.sleep(_PAUSE)
            try:
                slots = dict(self._ask())
            except (OSError, ValueError) as error:
                if str(error) != problem:
                    self._say(f"{error}; continuing with the hosts that it has named before")
                problem = str(error)
                continue
            problem = ""
            if slots != self.slots:
                self.slots = slots
                self.changed.set()
