"""What all ranks of a recorded run did when: summed up, put into a sentence, drawn."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median

from IPython.display import HTML, display

from ring_notebook.notebook.record.run_files import TIMELINE
from ring_notebook.notebook.table import Listing
from ring_notebook.notebook.timeline import gantt
from ring_notebook.notebook.timeline.spans import PHASES, Span, read_spans

__all__ = ["Account", "Timeline", "account", "explain"]

# Below this share of the time nothing is worth a sentence.
NOTABLE = 0.05


@dataclass
class Account:
    """Where the seconds of one rank went. ``compute`` is what no phase accounts for."""

    rank: int
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    compute: float = 0.0
    waited_for: float = 0.0  # how long others have waited for this rank, the longest of them each time


class Timeline:
    """The timeline of one run. A notebook shows why it is slow, a table, and a view of all ranks to zoom into.

    ``path`` is the whole trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open; ``labels`` is what ranks
    say of the whole run: how their GPU tensors went.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / TIMELINE
        if not self.path.exists():
            raise FileNotFoundError(f"{directory.name} has no timeline; record one with `%%ringtrain --timeline`")
        events = json.loads(self.path.read_text(encoding="utf-8"))["traceEvents"]
        self.spans = read_spans(events)
        self.labels = sorted({one["args"]["labels"] for one in events if one["name"] == "process_labels"})

    def between(self, begin: float, end: float) -> Timeline:
        """The same, from ``begin`` to ``end`` seconds only: drawn in more detail, and summed up for itself."""
        part = Timeline.__new__(Timeline)
        part.path, part.labels = self.path, self.labels
        part.spans = [
            span._replace(begin=max(span.begin, begin), end=min(span.end, end))
            for span in self.spans
            if span.end > begin and span.begin < end
        ]
        return part

    @property
    def seconds(self) -> float:
        """From the first event to the last one."""
        return max((span.end for span in self.spans), default=0.0) - self.begin

    @property
    def begin(self) -> float:
        """When the first event is, in seconds since the first one of the run."""
        return min((span.begin for span in self.spans), default=0.0)

    @property
    def accounts(self) -> list[Account]:
        """Where the time of each rank went."""
        return account(self.spans, self.seconds)

    @property
    def why(self) -> str:
        """What the time went to, and who held the others up, in a sentence."""
        return explain(self.accounts, self.spans, self.seconds)

    @property
    def table(self) -> Listing:
        """The accounts as shares of the time."""
        shown = [phase for phase in PHASES if any(one.phases[phase] for one in self.accounts)]
        rows = [
            [
                str(one.rank),
                *(f"{seconds / self.seconds:.1%}" for seconds in (one.compute, *(one.phases[name] for name in shown))),
                f"{one.waited_for:.3g} s",
            ]
            for one in self.accounts
        ]
        facts = "; ".join([f"{self.seconds:.3g} s", *self.labels])
        note = f"{facts}; the whole trace, for ui.perfetto.dev, is in {os.path.relpath(self.path)}"
        return Listing(["rank", "compute", *shown, "others waited for it"], rows, note)

    def __repr__(self) -> str:
        return f"{self.why}\n{self.table!r}"

    def _ipython_display_(self) -> None:
        display(HTML(f"<p><b>{escape(self.why)}</b></p>{self.table._repr_html_()}"))
        display({gantt.MIME: gantt.spec(self.spans), "text/plain": repr(self)}, raw=True)


def account(spans: Sequence[Span], seconds: float) -> list[Account]:
    """Sum the spans of each rank up. Operations of several groups at the same time count once."""
    accounts = {rank: Account(rank) for rank in sorted({span.rank for span in spans})}
    busy: dict[int, float] = dict.fromkeys(accounts, 0.0)
    reached: dict[int, float] = dict.fromkeys(accounts, 0.0)
    late: dict[tuple[int, int, int], float] = defaultdict(float)
    for span in sorted(spans, key=attrgetter("begin")):
        own = accounts[span.rank]
        own.phases[span.phase] += span.end - span.begin
        busy[span.rank] += max(0.0, span.end - max(span.begin, reached[span.rank]))
        reached[span.rank] = max(reached[span.rank], span.end)
        if span.phase == "waiting" and span.last >= 0 and span.last != span.rank:
            operation = (span.group, span.sequence, span.last)
            late[operation] = max(late[operation], span.end - span.begin)
    for (_, _, last), waited in late.items():
        if last in accounts:
            accounts[last].waited_for += waited
    for rank, own in accounts.items():
        own.compute = max(0.0, seconds - busy[rank])
    return list(accounts.values())


def explain(accounts: Sequence[Account], spans: Sequence[Span], seconds: float) -> str:
    """Why it took ``seconds``: a rank that the others wait for, the data, the communication, or nothing of these."""
    if not accounts or seconds <= 0:
        return "No collective was called, so there is nothing to tell about the ranks."
    slowest = max(accounts, key=lambda one: one.waited_for)
    waiting = fmean(one.phases["waiting"] for one in accounts)
    bubble = fmean(one.phases["bubble"] for one in accounts)
    data = fmean(one.phases["data"] for one in accounts)
    moving = fmean(one.phases["packing"] + one.phases["moving"] + one.phases["sending"] for one in accounts)
    if len(accounts) > 1 and slowest.waited_for > NOTABLE * seconds:
        total = sum(one.waited_for for one in accounts)
        if slowest.waited_for < 0.6 * total:
            return f"The ranks take turns in being late: others wait {_of(total, seconds)}, for no rank in particular."
        return f"Rank {slowest.rank} {_how(slowest, accounts)}; others wait for it {_of(slowest.waited_for, seconds)}."
    if bubble > NOTABLE * seconds and bubble >= max(waiting, data, moving):
        most = max(accounts, key=lambda one: one.phases["bubble"])
        return (
            f"The stages wait for messages of one another {_of(bubble, seconds)}, rank {most.rank} longest "
            f"({most.phases['bubble'] / seconds:.0%}): more micro-batches, or stages that take equally long, make this "
            "bubble smaller."
        )
    if data > NOTABLE * seconds and data >= moving:
        return f"Every rank waits for data {_of(data, seconds)}: a loader with more workers would help."
    if moving > NOTABLE * seconds:
        name, share, nbytes = _largest(spans)
        return (
            f"Moving and reducing data takes {_of(moving, seconds)}, {share:.0%} of it in {name} "
            f"({_size(nbytes)} each): a larger batch per rank, fewer synchronisations or compression would help."
        )
    if waiting > NOTABLE * seconds:  # in groups of other backends, which do not say for whom
        least = min(accounts, key=lambda one: one.phases["waiting"])
        return f"The ranks wait for one another {_of(waiting, seconds)}, rank {least.rank} least."
    return f"The ranks keep step: {1 - (waiting + bubble + data + moving) / seconds:.0%} of the time is compute."


def _how(slowest: Account, accounts: Sequence[Account]) -> str:
    others = [one for one in accounts if one is not slowest]
    data = slowest.phases["data"] - median(one.phases["data"] for one in others)
    usual = median(one.compute for one in others)
    if data > slowest.compute - usual:
        return f"waits {data:.2g} s longer for data than the others"
    return f"is {slowest.compute / usual:.1f}x slower in compute" if usual > 0 else "is slower in compute"


def _of(part: float, seconds: float) -> str:
    return f"{part / seconds:.0%} of the time"


def _largest(spans: Sequence[Span]) -> tuple[str, float, int]:
    """The operation that takes most of the time in which data moves: its name, its share of that, its bytes."""
    totals: dict[str, float] = defaultdict(float)
    sizes: dict[str, int] = {}
    for span in spans:
        if span.phase in ("packing", "moving", "sending"):
            totals[span.what] += span.end - span.begin
            sizes[span.what] = max(sizes.get(span.what, 0), span.nbytes)
    name = max(totals, key=lambda what: totals[what])
    return name, totals[name] / sum(totals.values()), sizes[name]


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 1024:.1f} KiB"
