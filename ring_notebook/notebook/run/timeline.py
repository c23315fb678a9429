"""What all ranks of a recorded run did when: summed up, put into a sentence, drawn."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from html import escape
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from IPython.display import HTML, display

from ring_notebook.analysis.operation_log import OPERATION, PARTING, complete
from ring_notebook.analysis.slow_ranks_and_links import explain
from ring_notebook.analysis.time_breakdown import SHARES, Spent, links, own_time, shares
from ring_notebook.notebook.colors import GREY, PHASE_COLORS
from ring_notebook.notebook.record.run_files import TIMELINE
from ring_notebook.notebook.table import Listing
from ring_notebook.protocol.records import COUNTED, PROGRAM, TRAINING
from ring_notebook.text.words import plural, rank_list, size_text

MIME = "application/vnd.vegalite.v5+json"
WORDS = {part: word for word, part in SHARES.items()}
"""The words of the table for phases, where they differ from the phases."""
OWN_WORK = "outside collectives"
"""The word for time in which nothing is known to hold a rank."""
# JupyterLab lets the place of a chart follow the width of the chart. One that follows its place needs this style; with
# Vega-Lite's own width "container" the page hangs without it. Where a page drops the style, the width is _WIDTH.
_CSS = """<style>
.jp-OutputArea-child:has(.ring-timeline) + .jp-OutputArea-child .vega-embed { width: calc(100% - 10px); }
/* Moved from a screen with more pixels, a chart would keep the width that it had there. */
@media (max-resolution: 1dppx) { .jp-OutputArea-child:has(.ring-timeline) + .jp-OutputArea-child
  .vega-embed canvas { width: auto !important; height: auto !important; } }
</style>"""
_WIDTH, _LEAST = 560, 300  # pixels
_PLACE = f"containerSize()[0] < {_LEAST} ? {_WIDTH} : containerSize()[0]"
MOST_BARS = 3000  # of some 100 bytes each in the saved notebook
_NEWEST = 12  # operations in a table
_STRETCH = 1.5  # readings of counters must cover a part of the timeline up to this factor
HELD = ("held", "held up")
"""Phases in which an operation holds the program; in the second, a part of the first, another rank is late."""


@dataclass(frozen=True)
class Account:
    """Where the seconds of one rank went, and the median time for which other ranks waited for it."""

    rank: int
    spent: Spent
    waited_for: float = 0.0


class Timeline:
    """The timeline of one run. A notebook shows why it is slow, a table, and a view of all ranks to zoom into.

    Of a run that failed without ``--timeline`` it has the last operations of all ranks, and where ranks part.

    ``path`` is the whole trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open; ``labels`` are facts of the
    whole run: how GPU tensors moved.
    """

    def __init__(self, events: Sequence[dict[str, Any]], path: Path | None = None) -> None:
        self.path = path
        self._is_of_last_operations = any(one.get("cat") == OPERATION for one in events)
        events = complete(events)
        self.spans = read_spans(events)
        self.parting = next((span.what for span in self.spans if span.phase == PARTING), "")
        self._training = read_training(events)
        if self._training:  # set-up came before
            self.spans = within(self.spans, self.begin, self.begin + self.seconds)
        self._counted = read_counted(events)
        self.labels = sorted({one["args"]["labels"] for one in events if one["name"] == "process_labels"})

    @classmethod
    def of_run(cls, directory: Path) -> Timeline:
        """The timeline of the run in ``directory``. Raises FileNotFoundError if none was recorded."""
        path = directory / TIMELINE
        if not path.exists():
            raise FileNotFoundError(f"{directory.name} has no timeline; record one with `%%ringtrain --timeline`")
        return cls(json.loads(path.read_text(encoding="utf-8"))["traceEvents"], path)

    def between(self, begin: float, end: float) -> Timeline:
        """The part from ``begin`` to ``end`` seconds: drawn in more detail, with its own sums."""
        part = copy(self)
        part._training = {
            rank: (max(began, begin), max(began, min(ended, end))) for rank, (began, ended) in self._training.items()
        }
        part.spans = within(self.spans, begin, end)
        return part

    @property
    def begin(self) -> float:
        """When it begins, in seconds since the first event of the run: with the training, if ranks have trained."""
        begins = (begin for begin, _ in self._training.values())
        return min(begins, default=min((span.begin for span in self.spans), default=0.0))

    @property
    def seconds(self) -> float:
        """How long it is, as drawn; the shares of the table refer to it."""
        ends = (end for _, end in self._training.values())
        return max(ends, default=max((span.end for span in self.spans), default=0.0)) - self.begin

    @property
    def accounts(self) -> list[Account]:
        """Where the time of each rank went, from its first row to the end of its cell."""
        return account(self.spans, self._training, self._counted)

    @property
    def why(self) -> str:
        """A sentence: where the time went and which rank held others up; for a run that failed, where ranks part."""
        if self._is_of_last_operations:
            return self.parting or "All ranks called the same operations."
        accounts = [one for one in self.accounts if one.spent.seconds > 0]
        if not accounts or not self.spans:
            return "No collective was called, so there is nothing to tell about the ranks."
        waited_for = {one.rank: one.waited_for for one in accounts}
        return explain({one.rank: one.spent for one in accounts}, waited_for, _largest(self.spans))

    @property
    def table(self) -> Listing:
        """The accounts as shares of each rank's time, which make up all of it; without them the last operations."""
        if self._is_of_last_operations:
            return self._last_operations()
        accounts = self.accounts
        parts = shares([one.spent for one in accounts])
        rows = [
            [str(one.rank), *(f"{of[index]:.1%}" for of in parts.values()), f"{one.waited_for:.3g} s"]
            for index, one in enumerate(accounts)
        ]
        facts = "; ".join([f"{self.seconds:.3g} s", *self.labels])
        note = f"{facts}{self._where}"
        return Listing(["rank", *parts, "others waited for it"], rows, note)

    @property
    def _own_work(self) -> str:
        """The word for what ranks did while nothing held them: "compute" if counters show no other cause."""
        ranks = [one.spent for one in self.accounts]
        counted = ranks and all(one.own.on_cpu for one in ranks)
        return "compute" if counted and not {"asleep", "off core"} & shares(ranks).keys() else OWN_WORK

    @property
    def _where(self) -> str:
        return f"; the whole trace, for ui.perfetto.dev, is in {os.path.relpath(self.path)}" if self.path else ""

    def _last_operations(self) -> Listing:
        """The newest operations, with the ranks that never came to them."""
        calls: dict[tuple[int, int, str], list[Span]] = defaultdict(list)
        for span in self.spans:
            if span.phase == "waiting":
                calls[span.group, span.sequence, "" if span.sequence else span.what].append(span)
        newest = sorted(calls.values(), key=lambda spans: min(span.begin for span in spans))[-_NEWEST:]
        ranks = {span.rank for span in self.spans}
        rows = []
        for spans in newest:
            first, last = min(spans, key=attrgetter("begin")), max(spans, key=attrgetter("begin"))
            missing = sorted(ranks - {span.rank for span in spans}) if first.group == 0 else []
            rows.append(
                [
                    "; ".join(sorted({span.what for span in spans})),
                    next((span.line for span in spans if span.line), ""),
                    f"{first.begin:.6f} s",
                    f"{1000 * (last.begin - first.begin):.3f} ms, rank {last.rank}",
                    rank_list(missing) or "none",
                ]
            )
        note = f"the last operations of {plural(len(ranks), 'rank')}{self._where}"
        return Listing(["operation", "called at", "first rank came", "last one later", "never came"], rows, note)

    def __repr__(self) -> str:
        return f"{self.why}\n{self.table!r}"

    def _ipython_display_(self) -> None:
        display(HTML(f"{_CSS}<p class='ring-timeline'><b>{escape(self.why)}</b></p>{self.table._repr_html_()}"))
        display({MIME: vega_lite(self.spans, self._training, self._own_work), "text/plain": repr(self)}, raw=True)


def account(
    spans: Sequence[Span], training: Mapping[int, tuple[float, float]], counted: Mapping[int, Sequence[Counted]] = {}
) -> list[Account]:
    """Sum up what held each rank from the beginning to the end of its ``training``."""
    waits: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))  # by late rank and by waiting rank
    own: dict[int, list[Span]] = {rank: [] for rank in sorted(training)}
    for span in spans:
        if span.rank not in training:
            continue
        own[span.rank].append(span)
        begin, end = training[span.rank]
        if span.phase == "held up" and span.last not in (-1, span.rank):
            waits[span.last][span.rank] += max(0.0, min(span.end, end) - max(span.begin, begin))
    return [
        Account(
            rank,
            spent_in(own[rank], *training[rank], counted_in(counted.get(rank, ()), *training[rank])),
            median(waits[rank].values()) if waits[rank] else 0.0,
        )
        for rank in own
    ]


def _largest(spans: Sequence[Span]) -> str:
    """The operation that takes most of the time in which data moves: its name, its share of that, its bytes."""
    totals: dict[str, float] = defaultdict(float)
    sizes: dict[str, int] = {}
    for span in spans:
        if span.phase in ("packing", "moving", "sending"):
            totals[span.what] += span.end - span.begin
            sizes[span.what] = max(sizes.get(span.what, 0), span.nbytes)
    if not any(totals.values()):
        return ""
    name = max(totals, key=lambda what: totals[what])
    return f", {totals[name] / sum(totals.values()):.0%} of it in {name} ({size_text(sizes[name])} each)"


class Span(NamedTuple):
    """One thing that a rank did, in seconds since the first event of the run.

    ``phase`` is "packing", "waiting", "moving" or "sending" of an operation of ``group``, with or without the program;
    in the group PROGRAM one of HELD, or "data", "bubble", "moving" and, for operations of other backends, "waiting".
    ``last`` is the rank that came last, -1 if nobody waited.
    """

    rank: int
    begin: float
    end: float
    phase: str
    what: str
    group: int
    sequence: int
    nbytes: int
    last: int
    line: str = ""


def read_spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    """The spans among events in Chrome's format, by begin, without queued operations, which take nobody's time."""
    first = _first(events)
    spans = []
    for event in events:
        if event["ph"] != "X":
            continue
        args, begin = event["args"], event["ts"] * 1e-6 - first
        spans.append(
            Span(
                event["pid"],
                begin,
                begin + event["dur"] * 1e-6,
                event["cat"],
                event["name"],
                event["tid"],
                args.get("sequence", 0),
                args.get("bytes", 0),
                args.get("last to arrive", -1),
                args.get("line", ""),
            )
        )
    return sorted(spans, key=attrgetter("begin"))


def within(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """The spans, or the parts of them, from ``begin`` to ``end``."""
    inside = (span for span in spans if span.end > begin and span.begin < end)
    return [span._replace(begin=max(span.begin, begin), end=min(span.end, end)) for span in inside]


def read_training(events: Iterable[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    """When the training of each rank began and ended, in seconds since the first event of the run."""
    first = _first(events)
    marks: dict[int, list[float]] = {}
    for event in events:
        if event.get("cat") == TRAINING:
            marks.setdefault(event["pid"], []).append(event["ts"] * 1e-6 - first)
    return {rank: (min(moments), max(moments)) for rank, moments in marks.items()}


def _first(events: Iterable[dict[str, Any]]) -> float:
    """When the first thing was done, or the first rank began to train."""
    timed = (event["ts"] * 1e-6 for event in events if event["ph"] == "X" or event.get("cat") == TRAINING)
    return min(timed, default=0.0)


class Counted(NamedTuple):
    """What a rank had counted until a moment, in seconds since the first event of the run."""

    moment: float
    values: Mapping[str, float]


def read_counted(events: Iterable[dict[str, Any]]) -> dict[int, list[Counted]]:
    """What ranks have counted, by rank and in order of time."""
    first, found = _first(events), defaultdict[int, list[Counted]](list)
    for event in events:
        if event.get("cat") == COUNTED:
            found[event["pid"]].append(Counted(event["ts"] * 1e-6 - first, event["args"]))
    return {rank: sorted(counts, key=attrgetter("moment")) for rank, counts in found.items()}


def counted_in(counts: Sequence[Counted], begin: float, end: float) -> dict[str, float]:
    """What a rank has counted from ``begin`` to ``end``; nothing if it read its counters too rarely."""
    if end <= begin or len(counts) < 2:
        return {}
    first = max((one for one in counts if one.moment <= begin), default=counts[0])
    last = min((one for one in counts if one.moment >= end), default=counts[-1])
    covered = last.moment - first.moment
    if not (end - begin) / _STRETCH <= covered <= (end - begin) * _STRETCH:
        return {}
    part = (end - begin) / covered
    return {name: part * (count - first.values.get(name, 0.0)) for name, count in last.values.items()}


def spent_in(spans: Iterable[Span], begin: float, end: float, counted: Mapping[str, float] = {}) -> Spent:
    """Where the time of one rank went from ``begin`` to ``end``, in the parts that ranks count themselves in a run."""
    parts: dict[str, list[Span]] = {}
    for span in spans:
        if span.group == PROGRAM:
            parts.setdefault(span.phase, []).append(span)

    def seconds(*phases: str) -> float:
        return _covered([span for phase in phases for span in parts.get(phase, ())], begin, end)

    held_up = seconds("held up")
    moving = seconds("held", "moving") - held_up
    waiting, bubble, data = held_up + seconds("waiting"), seconds("bubble"), seconds("data")
    return Spent(end - begin, moving, waiting, bubble, data, own_time(counted), links(counted))


def _covered(spans: Iterable[Span], begin: float, end: float) -> float:
    """Seconds in which at least one of them was, since several threads of a program may wait at the same time."""
    total, reached = 0.0, begin
    for span in sorted(spans, key=attrgetter("begin")):
        until = min(span.end, end)
        total += max(0.0, until - max(span.begin, reached))
        reached = max(reached, until)
    return total


def vega_lite(
    spans: Sequence[Span], training: Mapping[int, tuple[float, float]] = {}, own_work: str = OWN_WORK
) -> dict[str, Any]:
    """A Vega-Lite chart of the spans; dragging and the wheel move and zoom the time axis.

    Neighbours that are too close to be told apart are drawn as one bar when there are more than MOST_BARS. The chart
    shows all the seconds that the table counts, those of ``training``; ``own_work`` names those without a span.
    """
    spans = [span for span in spans if span.phase not in HELD]  # what the program waited for is drawn already
    ends = {rank: end for rank, (_, end) in training.items()}
    for span in spans:
        ends[span.rank] = max(ends.get(span.rank, 0.0), span.end)
    begin = min([span.begin for span in spans] + [begin for begin, _ in training.values()], default=0.0)
    bars = [
        {
            "rank": rank,
            "phase": own_work,
            "begin": round(begin, 6),
            "end": round(end, 6),
            "what": "outside collectives",
        }
        for rank, end in sorted(ends.items())
    ]
    bars += [_bar(group) for group in _joined(spans, max(ends.values(), default=0.0) - begin)]
    colors = {WORDS.get(phase, phase): color for phase, color in PHASE_COLORS.items()}
    colors = {own_work: colors["compute"], **colors}
    used = {word: color for word, color in colors.items() if any(bar["phase"] == word for bar in bars)}
    # A page that opens draws the chart before its container has a width, and gets no event when it has.
    events = [{"source": "window", "type": "resize"}, {"type": "timer", "throttle": 500}]
    width = {"name": "width", "init": _PLACE, "on": [{"events": events, "update": _PLACE}]}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "width": _WIDTH,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "usermeta": {"embedOptions": {"patch": [{"op": "add", "path": "/signals/-", "value": width}]}},
        "height": {"step": max(6, min(26, 400 // max(1, len(ends))))},
        "background": "transparent",
        "config": {
            "axis": {"labelColor": GREY, "titleColor": GREY, "gridOpacity": 0.3},
            # At the right a narrow page cuts it off.
            "legend": {"labelColor": GREY, "titleColor": GREY, "orient": "top"},
            "view": {"stroke": None},
        },
        "data": {"values": bars},
        "params": [{"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}],
        "mark": {"type": "bar", "clip": True},
        "encoding": {
            "y": {"field": "rank", "type": "ordinal", "title": "rank"},
            "x": {
                "field": "begin",
                "type": "quantitative",
                "title": "seconds",
                "scale": {"nice": False, "zero": False},
                # Late labels have ten digits: show few, which do not touch each other.
                "axis": {"tickCount": 6, "labelOverlap": "greedy", "labelSeparation": 12},
            },
            "x2": {"field": "end"},
            "color": {
                "field": "phase",
                "type": "nominal",
                "title": None,
                "scale": {"domain": list(used), "range": list(used.values())},
            },
            "tooltip": [
                {"field": "rank"},
                {"field": "phase"},
                {"field": "what"},
                {"field": "for", "title": "waited for rank"},
                {"field": "begin", "format": ".6f", "title": "begin (s)"},
                {"field": "ms", "format": ".3f", "title": "took (ms)"},
            ],
        },
    }


def _joined(spans: Sequence[Span], seconds: float) -> list[list[Span]]:
    """The spans in groups that become one bar each."""
    near = 0.0
    while True:
        groups: list[list[Span]] = []
        open_groups: dict[tuple[int, str], list[Span]] = {}
        for span in spans:
            key = (span.rank, span.phase)
            group = open_groups.get(key)
            if group is not None and near and span.begin - group[-1].end < near:
                group.append(span)
            else:
                open_groups[key] = [span]
                groups.append(open_groups[key])
        if len(groups) <= MOST_BARS:
            return groups
        near = near * 2 or seconds / 8000


def _bar(group: Sequence[Span]) -> dict[str, Any]:
    first, end = group[0], max(span.end for span in group)
    bar: dict[str, Any] = {
        "rank": first.rank,
        "phase": WORDS.get(first.phase, first.phase),
        "begin": round(first.begin, 6),
        "end": round(end, 6),
        "ms": round((end - first.begin) * 1000, 3),
        "what": first.what if len(group) == 1 else f"{len(group)} operations",
    }
    if len(group) == 1 and first.last not in (-1, first.rank):
        bar["for"] = first.last
    return bar
