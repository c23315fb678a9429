"""Why a run is slow: ranks that the others wait for and their cause, a link between hosts, or what all ranks do.

Panel, report and `ringrun` show what `find` finds. A timeline has recorded every step, so it shows `explain`, which
always has a sentence. Noise never counts.

Each process measures what its time went to. A slow rank takes some seconds longer than the usual rank, and each cause
explains a part of them. The cause of the largest part is named, if that is more than a third.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_low
from typing import ClassVar

from ring_notebook.analysis.time_breakdown import SHARES, Spent
from ring_notebook.text.words import ranks, rate_text

SLOWER = 1.15  # times the work of the usual rank
WAITS = 0.10  # the least share of time that the others wait
NOTABLE = 0.05  # below this share of the time nothing is worth a sentence
LEAST_SECONDS, LEAST_STEPS = 4.0, 10  # before a rank is called slow

_SLOWER_LINK = 1.35  # times as much the others carry; equal ones measured up to 1.07
_LEAST_SENT = 4e6  # bytes, before the rate of a link counts
_MUCH_SLOWER = 10  # times; more is not counted
_LEAST_SHARE = 1 / 3
_MANY_FAULTS = 20.0  # pages a second read from the disk
_FAULT_SECONDS = 1e-4  # of the processor's time for one of them, at least
_MUCH_DISK = 1e6  # bytes a second
_DISK_SECONDS = 1e-9  # of the processor's time for a byte that is read or written, at least
_MORE_WORK = 0.2  # of the usual rank's seconds on cores; less is chance where each costs a wait for a core
_MORE_SAMPLES = 1.05  # times those of the others

CAUSES = {
    "data": ("in getting data", "Give its loader more workers, or its data a faster disk"),
    "throttled": ("because a CPU limit holds it up", "Raise the limit of its control group or container"),
    "queued": ("because other processes use its cores", "End them, or start fewer ranks or threads on that host"),
    "garbage": ("in collecting garbage", "Call gc.freeze() after the set-up, or gc.disable() during an epoch"),
    "memory": ("in reading pages that its memory had no room for", "Use less memory there, or raise its limit"),
    "disk": ("in reading and writing files", "Do that less often, or in a thread"),
    "threads": (
        "because its other threads hold its cores or Python's lock",
        "Move their work into a process of its own",
    ),
    "asleep": (
        "in sleeping or waiting outside of collectives",
        "Look for sleeps, locks, pipes and other processes that its steps wait for",
    ),
    "samples": ("because it has more samples in a step", "Give all ranks batches of the same size"),
    "compute": ("in compute", "It does more for each sample, or its cores are slower"),
    "several": ("for several reasons", "None of them explains a third of it"),
    "unknown": ("outside of collectives", "What it does there was not counted"),
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


@dataclass(frozen=True)
class SlowLink:
    """A link between hosts that is slower than the others, from a rank to one of another host.

    ``rate``: bytes a second while data is on its way; ``factor``: how many times faster the other links are, at
    least: their acknowledgements also pass the slow link. ``moving``: the share of time
    that the ranks move data.
    """

    source: int
    to: int
    rate: float
    factor: float
    moving: float
    ranks: ClassVar[tuple[int, ...]] = ()  # that are slow themselves

    @property
    def sentence(self) -> str:
        """Which link, how slow, what it costs, and what to do."""
        return (
            f"the link from the host of rank {self.source} to that of rank {self.to} carries {rate_text(self.rate)}, "
            f"the others at least {self.factor:.1f}x that; the ranks move data {self.moving:.0%} of the time. "
            "See what else uses it, and at which rate its network card runs; `sync_every` is for slow links"
        )


def find(spent: Mapping[int, Spent], steps: int | None = None) -> SlowRanks | SlowLink | None:
    """The slow ranks of a run that has made ``steps``, or the slow link between its hosts.

    None if nothing is slow, or too early. A recording of all steps has no ``steps``, and is never too short.
    """
    early = steps is not None and (steps < LEAST_STEPS or any(one.seconds < LEAST_SECONDS for one in spent.values()))
    return None if early or len(spent) < 2 else _find_ranks(spent) or _find_link(spent)


def explain(spent: Mapping[int, Spent], waited_for: Mapping[int, float], moved: str = "") -> str:
    """Why recorded steps took so long, in a sentence: what `find` finds, or what all ranks spend their time on.

    ``waited_for``: seconds that the usual one of the others waited for each rank; ``moved``: what most of the data was.
    """
    if found := find(spent):
        return f"{found.sentence[0].upper()}{found.sentence[1:]}."
    ranks = [*spent.values()]
    shares = {part: fmean(one.share(getattr(one, part)) for one in ranks) for part in SHARES.values()}
    slowest = max(waited_for, key=waited_for.__getitem__)
    others = [part for part in ("waiting", "bubble", "data", "moving") if shares[part] > NOTABLE]
    most = max(others, key=shares.__getitem__, default="")
    if most == "waiting":
        total = sum(waited_for.values())
        wait = f"{shares[most]:.0%} of the time"
        if total and waited_for[slowest] < 0.6 * total:
            return f"The ranks take turns in being late: each waits {wait}, for no rank in particular."
        least = min(spent, key=lambda rank: spent[rank].waiting)  # of other backends nothing else is known
        whom = f"mostly for rank {slowest}" if total else f"rank {least} least"
        return f"The ranks wait for one another {wait}, {whom}."
    if most == "bubble":
        longest = max(spent, key=lambda rank: spent[rank].bubble)
        return (
            f"The stages wait for messages of one another {shares[most]:.0%} of the time, rank {longest} longest "
            f"({spent[longest].share(spent[longest].bubble):.0%}): more micro-batches, or stages that take equally "
            "long, make this bubble smaller."
        )
    if most == "data":
        return f"Every rank waits for data {shares[most]:.0%} of the time: a loader with more workers would help."
    if most == "moving":
        return (
            f"Moving and reducing data takes {shares[most]:.0%} of the time{moved}: a larger batch per rank, fewer "
            "synchronisations or compression would help."
        )
    return f"The ranks keep step: {_work(shares, ranks)}."


def _work(shares: Mapping[str, float], ranks: Sequence[Spent]) -> str:
    """What ranks spend their own time on, as far as it was counted."""
    if not all(one.own.on_cpu for one in ranks):
        return f"{shares['compute']:.0%} of the time is spent outside of collectives"
    others = {"asleep": "sleep or waiting outside of collectives", "off_core": "sleep or waiting for a core"}
    parts = [f", and {shares[part]:.0%} {words}" for part, words in others.items() if shares[part] > NOTABLE]
    return f"{shares['compute']:.0%} of the time is compute{''.join(parts)}"


def _find_ranks(spent: Mapping[int, Spent]) -> SlowRanks | None:
    """The ranks that the others wait for, of ranks that keep step through collectives.

    Ranks in lockstep all have the same samples/s. The slow rank is the one that hardly waits. The newest report of a
    rank may be older than that of another and cover fewer steps, so shares of time are compared.
    """
    busy = {rank: one.share(one.busy) for rank, one in spent.items()}
    usual = median_low(busy.values())
    slow = [rank for rank, share in busy.items() if share > SLOWER * usual > 0]
    others = [rank for rank in spent if rank not in slow]
    waits = median(spent[rank].share(spent[rank].idle) for rank in others)
    # Where all do little work, a rank that does twice as much is not what the others wait for: a link may be.
    if not slow or waits < WAITS or max(busy.values()) - usual < NOTABLE:
        return None
    slowest = spent[max(slow, key=busy.__getitem__)]
    like = spent[min(others, key=lambda rank: abs(busy[rank] - usual))].over(slowest.seconds)
    return SlowRanks(tuple(slow), median(busy[rank] for rank in slow) / usual, cause(slowest, like), waits)


def _find_link(spent: Mapping[int, Spent]) -> SlowLink | None:
    """The slowest link between the hosts, if the ranks wait for it.

    None over one host, where no link stands out, or over other links than TCP. A rank sends to several.
    """
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
    """The name of what explains most of the time that ``slow`` takes longer than ``usual``.

    Where other processes use the cores, both ranks wait for one. These waits are named only where nothing else explains
    a third of the difference.
    """
    own, other = slow.own, usual.own
    longer = slow.busy - usual.busy
    # If others use all cores alike, both wait equally long for each second on a core.
    each = other.queued / other.on_cpu if other.on_cpu else 0.0
    queued = max(0.0, own.queued - max(other.queued, each * own.on_cpu))
    throttled = min(max(0.0, own.throttled - other.throttled), queued)
    asleep = _slept_longer(slow, usual)
    held = _held_by_threads(slow, usual, asleep + queued, each)
    explained: dict[str, float] = defaultdict(float)
    behind = own.queued_for_data - other.queued_for_data - each * max(0.0, own.on_cpu - other.on_cpu)
    explained["data"] = slow.fetching - usual.fetching - max(0.0, behind)
    explained["garbage"] = own.collecting - other.collecting
    explained["throttled"] = throttled
    kind = _kind_of_sleep(slow, usual)
    # A rank that reads or writes wakes more often, and waits for a core each time, where the others wait for one too.
    explained[held or (kind if kind != "asleep" and each > 1 else "queued")] += queued - throttled
    explained[held or kind] += asleep
    rest = longer - sum(explained.values())
    # A rank that collects garbage waits for a core, too.
    garbage_waits = min(max(0.0, rest), max(0.0, explained["garbage"]) * each)
    explained["garbage"] += garbage_waits
    rest -= garbage_waits
    work, behind_others = _kind_of_work(slow, usual, longer), 0.0
    if work == "compute":  # else samples, pages or bytes were counted
        behind_others = min(max(0.0, rest - _worked_longer(slow, usual) * (1 + each)), own.queued - queued)
    explained[work] += rest - behind_others
    most = max(explained, key=explained.__getitem__)
    if explained[most] > _LEAST_SHARE * longer:
        return most
    return "queued" if behind_others > _LEAST_SHARE * longer else "several"


def _slept_longer(slow: Spent, usual: Spent) -> float:
    """Seconds that the main thread of ``slow`` slept longer in its own work; 0 where unknown.

    It is taken to sleep for the same part of its waits and movements of data as the usual rank.
    """
    held, usually_held = slow.idle + slow.moving, usual.idle + usual.moving
    in_waits = min(usual.blocked, usually_held)
    part = in_waits / usually_held if usually_held else 0.0
    return max(0.0, slow.blocked - part * held - (usual.blocked - in_waits))


def _worked_longer(slow: Spent, usual: Spent) -> float:
    """Seconds that the threads of ``slow`` were longer on cores; 0 where that may be chance."""
    usually = usual.own.on_cpu + usual.own.beside
    longer = slow.own.on_cpu + slow.own.beside - usually
    return longer if longer > _MORE_WORK * usually else 0.0


def _held_by_threads(slow: Spent, usual: Spent, seconds: float, each: float) -> str:
    """The cause if other threads of its process have computed while a main thread waited ``seconds`` longer, or empty.

    Their waits for cores count too, if they computed longer by more than chance. If the usual rank's other threads use
    more of a core than its main thread, they compute for it, as in TensorFlow and XLA.
    """
    own, other = slow.own, usual.own
    longer = own.beside - other.beside
    if longer * (1 + each * (longer > _MORE_WORK * (other.on_cpu + other.beside))) <= seconds / 2:
        return ""
    return "compute" if other.beside > other.on_cpu else "threads"


def _kind_of_sleep(slow: Spent, usual: Spent) -> str:
    """Why a main thread slept: the pages or files of which it has read more than the usual rank."""
    own, other = slow.own, usual.own
    if own.faults - other.faults > _MANY_FAULTS * slow.seconds:
        return "memory"
    return "disk" if own.disk - other.disk > _MUCH_DISK * slow.seconds else "asleep"


def _kind_of_work(slow: Spent, usual: Spent, longer: float) -> str:
    """What a main thread did when it did not sleep: it read pages, read or wrote files, or computed more."""
    own, other = slow.own, usual.own
    if not own.on_cpu or not other.on_cpu:
        return "unknown"
    if (own.faults - other.faults) * _FAULT_SECONDS > _LEAST_SHARE * longer:
        return "memory"
    if (own.disk - other.disk) * _DISK_SECONDS > _LEAST_SHARE * longer:
        return "disk"
    return "samples" if own.samples > _MORE_SAMPLES * other.samples > 0 else "compute"
