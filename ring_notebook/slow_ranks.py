"""Which ranks the others wait for, and why, or which link between hosts; noise never counts.

Each process measures what its time went to. A slow rank takes some seconds longer than the usual rank, and each cause
explains a part of them. The cause of the largest part is named, if that is more than a third.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, median_low

from ring_notebook.spent import Spent
from ring_notebook.words import ranks

SLOWER = 1.15  # times the work of the usual rank
WAITS = 0.10  # the least share of time that the others wait
LEAST_SECONDS, LEAST_STEPS = 4.0, 10  # before a rank is called slow

_SLOWER_LINK = 1.35  # times as much the others carry; equal ones measured up to 1.07
_LEAST_SENT = 4e6  # bytes, before the rate of a link counts
_MUCH_SLOWER = 10  # times; more is not counted
_LEAST_SHARE = 1 / 3
_MANY_FAULTS = 20.0  # pages a second read from the disk
_FAULT_SECONDS = 1e-4  # of the processor's time for one of them, at least
_MUCH_DISK = 1e6  # bytes a second
_MORE_SAMPLES = 1.05  # times those of the others

CAUSES = {
    "data": ("in getting data", "Give its loader more workers, or its data a faster disk"),
    "throttled": ("because a CPU limit holds it up", "Raise the limit of its control group or container"),
    "queued": ("because other processes use its cores", "End them, or start fewer ranks or threads on that host"),
    "garbage": ("in collecting garbage", "Call gc.freeze() after the set-up, or gc.disable() during an epoch"),
    "memory": ("in reading pages that its memory had no room for", "Use less memory there, or raise its limit"),
    "disk": ("in reading and writing files", "Do that less often, or in a thread"),
    "threads": ("because its other threads hold Python's lock", "Move their work into a process of its own"),
    "asleep": ("in sleeping or waiting outside of collectives", "`--timeline` shows where"),
    "samples": ("because it has more samples in a step", "Give all ranks batches of the same size"),
    "compute": ("in compute", "It does more for each sample, or its cores are slower; `--timeline` compares the ranks"),
}
"""By cause: the words that follow "rank 1 is 1.5x slower", and what to do."""


@dataclass(frozen=True)
class SlowRanks:
    """Ranks that take longer than the usual rank for the same step.

    ``factor``: how many times as long; ``cause``: a name of `CAUSES`; ``waits``: the share of time that the others
    wait.
    """

    ranks: tuple[int, ...]
    factor: float
    cause: str
    waits: float

    @property
    def sentence(self) -> str:
        """Which ranks, why, how long the others wait, and what to do."""
        verb = "is" if len(self.ranks) == 1 else "are"
        why, advice = CAUSES[self.cause]
        # Where the others do nearly nothing themselves, the factor says no more than that.
        times = f"{self.factor:.1f}x" if self.factor < _MUCH_SLOWER else f"over {_MUCH_SLOWER}x"
        slow = f"{ranks(self.ranks)} {verb} {times} slower {why}"
        return f"{slow}; the others wait {self.waits:.0%}. {advice}"


def find(spent: Mapping[int, Spent], steps: int) -> SlowRanks | None:
    """The slow ranks of a run that has made ``steps``, whose ranks keep step through collectives.

    None if there are none, or too early. Ranks in lockstep all have the same samples/s. The slow rank is the one that
    hardly waits.
    """
    if len(spent) < 2 or not any(one.idle for one in spent.values()):
        return None
    if min(one.seconds for one in spent.values()) < LEAST_SECONDS or steps < LEAST_STEPS:
        return None
    usual = median_low(one.busy for one in spent.values())
    slow = {rank: one for rank, one in spent.items() if one.busy > SLOWER * usual > 0}
    others = [one for rank, one in spent.items() if rank not in slow]
    waits = median(one.share(one.idle) for one in others)
    if not slow or waits < WAITS:
        return None
    slowest = max(slow.values(), key=lambda one: one.busy)
    like = min(others, key=lambda one: abs(one.busy - usual))
    return SlowRanks(tuple(slow), median(one.busy for one in slow.values()) / usual, cause(slowest, like), waits)


@dataclass(frozen=True)
class SlowLink:
    """A link between hosts that is slower than the others, from a rank to one of another host.

    ``rate``: bytes a second while data is on its way; ``factor``: how many times as much the others carry, at least:
    what acknowledges data on the way back goes through the slow link and waits there. ``moving``: the share of time
    that the ranks move data.
    """

    source: int
    to: int
    rate: float
    factor: float
    moving: float

    @property
    def sentence(self) -> str:
        """Which link, how slow, what it costs, and what to do."""
        return (
            f"the link from the host of rank {self.source} to that of rank {self.to} carries {self.rate / 1e6:.3g} "
            f"MB/s, the others at least {self.factor:.1f}x that; the ranks move data {self.moving:.0%} of the time. "
            "See what else uses it, and at which rate its network card runs; `sync_every` is for slow links"
        )


def find_link(spent: Mapping[int, Spent], steps: int) -> SlowLink | None:
    """The slowest link between the hosts of a run that has made ``steps``, if the ranks wait for it.

    None over one host, where no link stands out, over other links than TCP, or too early. A rank sends to several.
    """
    if len(spent) < 2 or min(one.seconds for one in spent.values()) < LEAST_SECONDS or steps < LEAST_STEPS:
        return None
    moving = median(one.share(one.moving) for one in spent.values())
    links = [
        (sent.bytes / sent.seconds, rank, sent)
        for rank, one in spent.items()
        for sent in one.links
        if sent.bytes > _LEAST_SENT and sent.seconds > 0
    ]
    if len(links) < 2 or moving < WAITS:
        return None
    (rate, source, slowest), *others = sorted(links)
    factor = median(other for other, _, _ in others) / rate
    if factor < _SLOWER_LINK or spent[source].share(slowest.seconds) < WAITS:
        return None
    return SlowLink(source, slowest.to, rate, factor, moving)


def cause(slow: Spent, usual: Spent) -> str:
    """The name of what explains most of the time that ``slow`` takes longer than ``usual``."""
    own, other = slow.own, usual.own
    longer = slow.busy - usual.busy
    data = slow.data - usual.data
    queued = own.queued - other.queued
    throttled = min(own.throttled - other.throttled, queued)
    garbage = own.collecting - other.collecting
    asleep = max(0.0, _asleep(slow) - _asleep(usual))
    paging = (own.faults - other.faults) * _FAULT_SECONDS
    more = "samples" if own.samples > _MORE_SAMPLES * other.samples > 0 else "compute"
    more = "memory" if paging > _LEAST_SHARE * longer else more
    explained = {
        "data": data,
        "throttled": throttled,
        "queued": queued - throttled,
        "garbage": garbage,
        _kind_of_sleep(slow, usual): asleep,
        more: longer - data - queued - garbage - asleep,
    }
    most = max(explained, key=explained.__getitem__)
    return most if explained[most] > _LEAST_SHARE * longer else "compute"


def _asleep(spent: Spent) -> float:
    """Seconds of a rank's own work in which its main thread was on no core and wanted none; 0 where unknown."""
    if not spent.own.on_cpu:
        return 0.0
    return max(0.0, min(spent.compute, spent.seconds - spent.own.on_cpu - spent.own.queued - spent.idle - spent.data))


def _kind_of_sleep(slow: Spent, usual: Spent) -> str:
    """Why a main thread slept: the pages, files or threads of which it has more than the usual rank."""
    own, other = slow.own, usual.own
    if own.faults - other.faults > _MANY_FAULTS * slow.seconds:
        return "memory"
    if own.beside - other.beside > _asleep(slow) / 2:
        return "threads"
    return "disk" if own.disk - other.disk > _MUCH_DISK * slow.seconds else "asleep"
