"""Where the seconds of a rank went: compute, moving data, waiting for ranks, for their messages, for data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, NamedTuple

SENDING, SENT = "sending to ", "sent to "
"""Prefixes of a rank of another host: the seconds in which data was on its way to it, and bytes."""
SHARES = {
    "compute": "compute",
    "asleep": "asleep",
    "off core": "off_core",
    "loading": "data",
    "moving": "moving",
    "waiting": "waiting",
    "bubble": "bubble",
}
"""The words for the parts of a rank's time, which make up all of it, and the attributes of `Spent`."""
SLEEPS = 0.05
"""The least share of time that is shown as sleep, or as time off a core: any thread has some now and then."""
_RARE = ("asleep", "off core")
"""Parts, by their words, that are shown as compute where no rank has `SLEEPS` of them."""


@dataclass(frozen=True, slots=True)
class OwnTime:
    """What Linux has counted of a rank's process over the seconds of its `Spent`; 0 for what it does not count.

    Seconds of its main thread: ``on_cpu`` on a core, of these ``collecting`` garbage; ``queued`` for a core that others
    used, of these ``throttled`` by the limit of its control group and ``queued_for_data`` before `track` had a batch.
    ``beside``: seconds of a core that its other threads used. ``faults``: pages read from a disk. ``disk``: bytes read
    and written. ``samples``: as logged.
    """

    on_cpu: float = 0.0
    queued: float = 0.0
    throttled: float = 0.0
    queued_for_data: float = 0.0
    collecting: float = 0.0
    beside: float = 0.0
    faults: float = 0.0
    disk: float = 0.0
    samples: float = 0.0


NOTHING_COUNTED = OwnTime()


class Sent(NamedTuple):
    """What went to the rank ``to`` of another host: ``seconds`` in which data was on its way, and ``bytes``."""

    to: int
    seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one rank. ``seconds`` is all of them: since its first step, or since the beginning of its cell.

    ``moving``: in collectives and messages, while data was packed, moved and reduced. ``waiting``: until other ranks
    called the operation. ``bubble``: until a message came, as between the stages of a pipeline. ``fetching``: until
    `track` had a batch. An operation in the background counts only while the rank waited for it. ``links``: what
    went to ranks of other hosts over TCP.
    """

    seconds: float
    moving: float
    waiting: float
    bubble: float
    fetching: float
    own: OwnTime = NOTHING_COUNTED
    links: tuple[Sent, ...] = ()

    @property
    def data(self) -> float:
        """Seconds until `track` had a batch, without those in which the rank could have continued but had no core."""
        return max(0.0, self.fetching - self.own.queued_for_data)

    @property
    def idle(self) -> float:
        """Seconds in which the rank waited for others."""
        return self.waiting + self.bubble

    @property
    def busy(self) -> float:
        """Seconds outside of collectives and messages: the rank's own work, and its waiting for data."""
        return max(0.0, self.seconds - self.moving - self.idle)

    @property
    def own_work(self) -> float:
        """Seconds outside of collectives, messages and waits for data."""
        return max(0.0, self.busy - self.data)

    @property
    def blocked(self) -> float:
        """Seconds in which the main thread was on no core and wanted none, whatever it waited for; 0 if not counted."""
        own = self.own
        return max(0.0, self.seconds - own.on_cpu - own.queued - self.data) if own.on_cpu else 0.0

    @property
    def asleep(self) -> float:
        """Seconds of the rank's own work in which its process was on no core and wanted none; 0 where not counted.

        A lower bound: a main thread that sleeps while other threads compute may wait for them, and it may sleep while
        it moves data.
        """
        return min(max(0.0, self.blocked - self.own.beside - self.idle - self.moving), self.own_work)

    @property
    def off_core(self) -> float:
        """Other seconds of its own work in which it was on no core: it slept, or waited for a core that others used.

        The two cannot be told apart: the system counts a rank's waits for a core together, those in collectives too.
        """
        own = self.own
        without = self.own_work - self.asleep - own.on_cpu - own.beside
        return min(max(0.0, without), own.queued) if own.on_cpu else 0.0

    @property
    def compute(self) -> float:
        """Seconds of the rank's own work, without those asleep or off a core."""
        return max(0.0, self.own_work - self.asleep - self.off_core)

    def over(self, seconds: float) -> Spent:
        """The same shares and rates over so many seconds."""
        times = seconds / self.seconds if self.seconds > 0 else 1.0
        parts = self.moving, self.waiting, self.bubble, self.fetching
        moving, waiting, bubble, fetching = (times * part for part in parts)
        own = OwnTime(*(times * getattr(self.own, one.name) for one in fields(OwnTime)))
        links = tuple(Sent(to, times * busy, times * sent) for to, busy, sent in self.links)
        return Spent(times * self.seconds, moving, waiting, bubble, fetching, own, links)

    def share(self, seconds: float) -> float:
        """A part of the seconds, 0 to 1."""
        return min(seconds / self.seconds, 1.0) if self.seconds > 0 else 0.0


NOTHING_SPENT = Spent(0.0, 0.0, 0.0, 0.0, 0.0)


def shares(ranks: Sequence[Spent]) -> dict[str, list[float]]:
    """By word of `SHARES` the shares of each rank's time, which make up all of it; without what is 0 for all ranks.

    Less of `_RARE` than `SLEEPS` on every rank counts as compute.
    """
    found = dict(zip(SHARES, map(list, zip(*map(_parts, ranks), strict=True)), strict=False))
    for word in _RARE:
        if found and max(found[word]) < SLEEPS:
            found["compute"] = [sum(pair) for pair in zip(found["compute"], found.pop(word), strict=True)]
    return {word: parts for word, parts in found.items() if any(parts)}


@lru_cache(maxsize=1024)  # a panel draws them again five times a second
def _parts(spent: Spent) -> tuple[float, ...]:
    """The shares of a rank's time, in the order of `SHARES`."""
    return tuple(spent.share(getattr(spent, part)) for part in SHARES.values())


def spent(facts: Mapping[str, Any], elapsed: float) -> Spent:
    """What a rank has reported of itself, in a run that has lasted ``elapsed`` seconds for it."""
    seconds, communication, waiting, bubble, data = (_number(facts, name) for name in _FACTS)
    idle = min(waiting, communication)
    bubble = min(bubble, idle)
    return Spent(seconds or elapsed, communication - idle, idle - bubble, bubble, data, own_time(facts), links(facts))


def own_time(facts: Mapping[str, Any]) -> OwnTime:
    """What a rank has counted of its process."""
    return OwnTime(*(_number(facts, one.name) for one in fields(OwnTime)))


def links(facts: Mapping[str, Any]) -> tuple[Sent, ...]:
    """What a rank has sent to those of other hosts."""
    to = [name.removeprefix(SENDING) for name in facts if name.startswith(SENDING)]
    return tuple(Sent(int(one), _number(facts, SENDING + one), _number(facts, SENT + one)) for one in to)


def _number(facts: Mapping[str, Any], name: str) -> float:
    return float(value) if isinstance(value := facts.get(name), int | float) else 0.0


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What one rank has measured of the steps after its warm-up: ``steps`` that took ``seconds``, with its ``samples``.

    ``spent``: the facts that `spent` takes, and the bytes ``posted`` to collectives. ``hosts`` is the number of hosts
    of the run, ``cores`` that of this host, or 0 where the rank computes on a GPU. ``last``: the last row.
    """

    rank: int
    hosts: int
    cores: int
    steps: int
    seconds: float
    samples: float
    spent: dict[str, float]
    last: dict[str, float] = field(default_factory=dict)


_FACTS = ("training", "communication", "waiting", "bubble", "data_wait")
