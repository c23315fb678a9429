"""The state of a run: how each record changes it, and its view at one moment."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from ring_notebook.analysis.slow_ranks_and_links import SlowLink, SlowRanks, find
from ring_notebook.analysis.time_breakdown import NOTHING_SPENT, Spent, spent
from ring_notebook.machine.energy import Used, used
from ring_notebook.notebook.record.displays import Displayed, Displays, logged
from ring_notebook.notebook.record.series import Extreme, Extremes, Points, Rate, Series
from ring_notebook.protocol.knobs import Range, Value, decoded
from ring_notebook.protocol.records import (
    Change,
    Cleared,
    Display,
    Ended,
    Failure,
    KnobRecord,
    Load,
    MetricBatch,
    Output,
    Params,
    Record,
    Status,
)
from ring_notebook.text.words import ranks

SAMPLES = "samples"  # the metric that is shown as throughput
EPOCH = "epoch"  # the metric whose changes are marked in the charts
LOGICAL_RANK = "logical_rank"  # the logical rank that logged a row, where they take turns
LOGICAL = "logical"  # the word before the number of a logical rank
UNCHARTED = (SAMPLES, EPOCH, LOGICAL_RANK)
_LOAD_POINTS = 120
MOST_CHANGES = 500  # the newest; all of them are on disk
MOST_PARTED = 4
MOST_EPOCHS = 200  # marks; every second one is dropped when there are more
OUTPUT_CHARACTERS = 100_000  # of printed output that stay in memory; all of it is on disk


class Printed(NamedTuple):
    """A piece of output, numbered from 1 in the order of arrival. A ``block`` is the lines of one print."""

    number: int
    rank: int
    stream: str
    text: str
    block: bool = False


@dataclass(frozen=True, slots=True)
class KnobView:
    """A knob: what it takes, and its present value."""

    range: Range
    value: Value


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank at one moment. Times are in seconds; ``left`` is None when unknown. ``spent`` is where its time went.

    ``quiet`` counts from its last metrics or output, ``idle`` from its last change of any kind (also of its progress,
    its line of the cell, its collective). ``samples_per_s`` is the current rate; after the rank's end, that of the
    whole run. ``first`` is the step of its first row. ``last`` are the newest values; of logical ranks the means of
    those that it carries. ``epoch``: for how long it has been in passes of this number, and how long it was in those
    before, 0 when unknown.
    """

    rank: int
    step: int
    last: Mapping[str, float]
    samples: float
    samples_per_s: float
    quiet: float
    idle: float
    left: float | None
    status: Status | None
    ended: Ended | None
    spent: Spent = NOTHING_SPENT
    first: int = 0
    epoch: tuple[float, float] = (0.0, 0.0)

    @property
    def progress(self) -> tuple[int, int]:
        """Steps done and to do; (0, 0) when unknown."""
        return self.status.progress if self.status else (0, 0)


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment: immutable, bounded, cheap to draw.

    ``curves``: points over steps, by metric and rank, or by logical rank for metrics that these logged in their turns.
    ``newest`` are their last values, ``extremes`` the least and the greatest mean over them at a step, ``last`` the
    mean at the newest step that all of them have logged. ``logical`` holds the rank that carries each logical rank,
    ``in_turns`` the metrics that they have logged. ``throughput``: samples/s over seconds since the
    start, by rank. ``output``: the newest lines that ranks printed, without ``dropped_lines`` older ones. ``displays``:
    the newest displays, without ``dropped`` older ones. ``media``: the newest image, figure, histogram or text logged
    under each name. ``cleared`` counts calls of clear_output. ``epochs`` are the steps at which the logged epoch
    changed, with its new value. ``broken`` holds the first value that is not finite of each metric and rank: its step,
    and "NaN" or "inf". ``loads`` holds what `records.Load` names over seconds since the start, by rank. ``axes`` holds,
    by rank as in ``ranks``, "time" (seconds since the start) and "samples" (of this rank until then, also in the run
    that this one continues) over steps. ``units`` are those that ranks have given to metrics. ``knobs`` are those of
    the run by name, ``changes`` the newest that ranks have taken, each as the first rank told it. ``parted`` has pairs:
    the same change, which two ranks have taken at different points by mistake.
    """

    size: int
    elapsed: float
    names: tuple[str, ...]
    curves: Mapping[str, Mapping[int, Points]]
    throughput: Mapping[int, Points]
    ranks: tuple[RankView, ...]
    output: tuple[Printed, ...]
    failures: tuple[Failure, ...]
    newest: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    extremes: Mapping[str, tuple[Extreme, Extreme]] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    logical: Mapping[int, int] = field(default_factory=dict)
    in_turns: frozenset[str] = frozenset()
    displays: tuple[Displayed, ...] = ()
    media: tuple[Displayed, ...] = ()
    dropped: int = 0
    dropped_lines: int = 0
    cleared: int = 0
    epochs: tuple[tuple[float, float], ...] = ()
    broken: Mapping[str, Mapping[int, tuple[float, str]]] = field(default_factory=dict)
    loads: Mapping[str, Mapping[int, Points]] = field(default_factory=dict)
    axes: Mapping[int, Mapping[str, Points]] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    knobs: Mapping[str, KnobView] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    parted: tuple[tuple[Change, Change], ...] = ()

    @property
    def step(self) -> int:
        """The newest step that all ranks which log have reached; 0 before the first."""
        return min((rank.step for rank in self.ranks if rank.last or rank.step), default=0)

    @property
    def paused(self) -> bool:
        """Whether a rank waits at a step for the end of a pause."""
        waits = [rank.status.extra.get("paused") for rank in self.ranks if rank.status and not rank.ended]
        return any(waits)

    @property
    def charted(self) -> tuple[str, ...]:
        """The metrics that have a curve."""
        return tuple(name for name in self.names if name not in UNCHARTED)

    def whose(self, name: str, of: Iterable[int]) -> str:
        """The ranks ``of`` a curve, or the logical ranks, in words."""
        return f"{LOGICAL if name in self.in_turns else ''} {ranks(of)}".strip()

    @property
    def slow(self) -> SlowRanks | SlowLink | None:
        """The ranks, or the link between hosts, that the others wait for."""
        return find({one.rank: one.spent for one in self.ranks}, max(one.step - one.first for one in self.ranks))

    @property
    def died(self) -> bool:
        """Whether the process of a rank has died in this run."""
        return any(rank.ended is not None and rank.ended.status == "died" for rank in self.ranks)

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks together."""
        return sum(rank.samples_per_s for rank in self.ranks)

    @property
    def progress(self) -> float | None:
        """The smallest share done of any rank, 0 to 1."""
        shares = [done / total for done, total in (rank.progress for rank in self.ranks) if total]
        return min(shares) if shares else None

    @property
    def energy(self) -> Used:
        """The energy that the run has used. An epoch is a pass over the loader, as `track` counts them."""
        facts = [one.ended.summary if one.ended else one.status.extra if one.status else {} for one in self.ranks]
        return used(facts, max(map(_passes, self.ranks), default=0.0))

    @property
    def left(self) -> float | None:
        """The seconds left of the slowest rank."""
        return max((rank.left for rank in self.ranks if rank.left is not None), default=None)

    def stuck(self, after: float) -> tuple[RankView, ...]:
        """The ranks that have not ended, when none of them has made progress for ``after`` seconds; else empty.

        Also empty if ``after`` is 0, and while the run is paused.
        """
        if not after or self.paused:
            return ()
        alive = tuple(rank for rank in self.ranks if rank.ended is None)
        return alive if all(rank.idle >= after for rank in alive) else ()


def charted_in(views: Iterable[RunView]) -> list[str]:
    """The metrics that have a curve in one of these runs."""
    return list(dict.fromkeys(name for view in views for name in view.charted))


def _passes(rank: RankView) -> float:
    """The passes over the loader that a rank has made; 0 if unknown."""
    done, total = rank.progress
    number = pass_of(rank.status) if rank.status else 0
    return number - 1 + done / total if number and total else 0.0


@dataclass(slots=True)
class _Rank:
    rate: Rate
    moved: float
    heard: float
    step: int = 0
    first: int | None = None
    earlier: float = 0.0  # samples, in the run that this one continues
    last: dict[str, float] = field(default_factory=dict)
    status: Status | None = None
    ended: Ended | None = None
    progress_start: tuple[float, int, int] = (0.0, 0, 0)
    epoch: tuple[int, float, float] = (0, 0.0, 0.0)
    """The number of its passes over loops, since when, and the seconds of the number before."""
    axes: dict[str, Series] = field(default_factory=dict)
    counted: tuple[Mapping[str, Any], Spent] = ({}, NOTHING_SPENT)
    """What the rank has reported of its time, and the result of `spent` for it."""

    def extend_axes(self, steps: array[float], seconds: Iterable[float], amounts: array[float] | None) -> None:
        """Keep the places of the rows on the other axes than steps."""
        self.axes.setdefault("time", Series(every=True)).extend(steps, array("d", seconds))
        if amounts is not None:  # before `rate` takes them
            totals = array("d", accumulate(amounts, initial=self.earlier + self.rate.total))[1:]
            self.axes.setdefault(SAMPLES, Series(every=True)).extend(steps, totals)

    def set_status(self, status: Status, now: float) -> None:
        before, self.status = self.status, status
        if before is None or _position(before) != _position(status):
            self.moved = now
        done, total = _steps_done(status)
        _, start_done, start_total = self.progress_start
        if total != start_total or done < start_done:
            self.progress_start = (now, done, total)
        number, (old, began, _) = pass_of(status), self.epoch
        if number != old:
            self.epoch = (number, now, (now - began) / (number - old) if 0 < old < number else 0.0)

    def spent(self, elapsed: float) -> Spent:
        killed = self.ended is not None and self.ended.status == "died"  # a killed rank has sent no summary
        facts = self.ended.summary if self.ended and not killed else self.status.extra if self.status else {}
        if killed and "training" not in facts:
            return NOTHING_SPENT
        if facts is not self.counted[0] or "training" not in facts:  # else the last result still holds
            self.counted = facts, spent(facts, self.ended.seconds if self.ended else elapsed)
        return self.counted[1]

    def left(self, now: float) -> float | None:
        if self.status is None or self.ended:
            return None
        start, start_done, _ = self.progress_start
        made = _steps_done(self.status)[0] - start_done
        done, total = self.status.progress
        return (now - start) / made * (total - done) if made > 0 else None


def _steps_done(status: Status) -> tuple[int, int]:
    """The steps of all passes over a loader until now, and of one pass."""
    done, total = status.progress
    return max(0, pass_of(status) - 1) * total + done, total


def pass_of(status: Status) -> int:
    """The number of the pass over a loop, from 1; 0 outside of loops, and if `track` knows the whole."""
    return int(status.extra.get("pass") or 0)


def _position(status: Status) -> tuple[object, ...]:
    waiting = status.waiting or {}
    return (
        status.progress,
        status.line,
        status.extra.get("importing"),
        waiting.get("sequence"),
        waiting.get("operation"),
    )


def _points(lines: Mapping[str, Mapping[int, Series]]) -> dict[str, dict[int, Points]]:
    """The points of each line by name and rank, ranks in order."""
    return {name: {rank: series.points() for rank, series in sorted(lines[name].items())} for name in lines}


class RunState:
    """Applies the records of a run and shows the result. Not locked: its owner does that.

    ``started`` and every ``now`` are seconds since the epoch on the kernel's clock.
    """

    def __init__(self, size: int, started: float) -> None:
        self.size = size
        self.started = started
        self.failures: list[Failure] = []
        self.names: dict[str, None] = {}
        self.params: dict[str, Any] = {}
        self.begins_with: dict[str, Any] = {}  # values of knobs that were set before the first step
        self._ranks = {rank: _Rank(Rate(started), moved=started, heard=started) for rank in range(size)}
        self._curves: dict[str, dict[int, Series]] = {}
        self._extremes: dict[str, Extremes] = {}
        self._output: deque[Printed] = deque()
        self._output_characters = 0
        self._dropped_lines = 0
        self._printed = 0
        self._displays, self._media = Displays(), Displays()
        self._cleared = 0
        self._epochs: list[tuple[float, float]] = []
        self._loads: dict[str, dict[int, Series]] = {}
        # Cached for views until a record changes them: views are made more often than curves and loads change.
        self._seen_curves: Mapping[str, Mapping[int, Points]] | None = None
        self._seen_extremes: Mapping[str, tuple[Extreme, Extreme]] = {}
        self._seen_last: Mapping[str, float] = {}
        self._seen_loads: Mapping[str, Mapping[int, Points]] | None = None
        self._broken: dict[str, dict[int, tuple[float, str]]] = {}
        self._newest: dict[str, dict[int, float]] = {}
        self._logical: dict[int, int] = {}
        self._in_turns: set[str] = set()
        self._units: dict[str, str] = {}
        self._knobs: dict[str, KnobView] = {}
        self._changes: deque[Change] = deque(maxlen=MOST_CHANGES)
        self._numbered: dict[int, Change] = {}  # `_changes` by number
        self._parted: list[tuple[Change, Change]] = []

    def apply(self, record: Record, now: float) -> None:
        """Apply one record. Raises ValueError when its rank is not one of the run."""
        rank = self._ranks.get(record.rank)
        if rank is None:
            raise ValueError(f"a record of rank {record.rank} in a run of {self.size} ranks")
        if isinstance(record, Status):
            rank.set_status(record, now)
            self._note_values(record)
            return
        if isinstance(record, Load):
            self._seen_loads = None
            for name, value in record.values.items():
                series = self._loads.setdefault(name, {}).setdefault(record.rank, Series(_LOAD_POINTS))
                series.extend((record.time - self.started,), (value,))
            return
        if isinstance(record, Params):
            self.params |= {k: v for k, v in record.values.items() if record.rank == 0 or k not in self.params}
            return
        if isinstance(record, KnobRecord):
            if record.name not in self._knobs:
                with suppress(TypeError, KeyError):  # of another version
                    self._knobs[record.name] = KnobView(decoded(record.range), record.value)
            return
        rank.moved = rank.heard = now
        if isinstance(record, Change):
            self._change(record)
        elif isinstance(record, MetricBatch):
            self._metrics(rank, record)
        elif isinstance(record, Output):
            self._print(record)
        elif isinstance(record, Display):
            (self._media if logged(record) else self._displays).add(record, self._printed)
        elif isinstance(record, Cleared):
            self._clear(record.rank)
        elif isinstance(record, Failure):
            self.failures.append(record)
        elif isinstance(record, Ended):
            rank.ended = record

    def _note_values(self, status: Status) -> None:
        """Take over the values of knobs that a schedule has changed."""
        values = status.extra.get("knobs")
        if isinstance(values, dict) and status.rank == min(self._ranks):
            for name in self._knobs.keys() & values.keys():
                self._knobs[name] = replace(self._knobs[name], value=values[name])

    def _change(self, change: Change) -> None:
        first = self._numbered.get(change.number)
        if first is not None:
            if (first.point, first.values) != (change.point, change.values) and len(self._parted) < MOST_PARTED:
                self._parted.append((first, change))
            return
        if len(self._changes) == MOST_CHANGES:
            del self._numbered[self._changes[0].number]
        self._changes.append(change)
        self._numbered[change.number] = change
        if change.point == 0:
            self.begins_with |= change.values
        for name in self._knobs.keys() & change.values.keys():
            self._knobs[name] = replace(self._knobs[name], value=change.values[name])

    def _metrics(self, rank: _Rank, batch: MetricBatch) -> None:
        if not batch.values:
            return
        times, steps, *columns = (batch.values[index :: batch.width] for index in range(batch.width))
        rank.step = int(steps[-1])
        rank.first = int(steps[0]) if rank.first is None else rank.first
        self._continue(rank, batch.earlier)
        self._units |= batch.units
        amounts = columns[batch.names.index(SAMPLES)] if SAMPLES in batch.names else None
        rank.extend_axes(steps, (one - self.started for one in times), amounts)
        for name, values in zip(batch.names, columns, strict=True):
            self.names.setdefault(name)
            if name == SAMPLES:
                rank.rate.extend(times, values)
            elif name == EPOCH:
                self._mark_epochs(steps, values)
        if LOGICAL_RANK not in batch.names:
            for name, values in zip(batch.names, columns, strict=True):
                rank.last[name] = values[-1]
                self._extend(name, self._first_of(batch.rank) if name in self._in_turns else batch.rank, steps, values)
            return
        turns = columns[batch.names.index(LOGICAL_RANK)]
        for turn in dict.fromkeys(turns):
            rows = [row for row, one in enumerate(turns) if one == turn]
            self._logical[int(turn)] = batch.rank
            for name, values in zip(batch.names, columns, strict=True):
                self._begin_turns(name)
                self._extend(name, int(turn), *(array("d", (one[row] for row in rows)) for one in (steps, values)))
        own = [turn for turn, carrier in self._logical.items() if carrier == batch.rank]
        for name in batch.names:
            newest = [self._newest[name][turn] for turn in own if turn in self._newest[name]]
            rank.last[name] = sum(newest) / len(newest)

    def _extend(self, name: str, rank: int, steps: array[float], values: array[float]) -> None:
        """Add points of a metric, of a rank or a logical rank."""
        self._newest.setdefault(name, {})[rank] = values[-1]
        if not math.isfinite(sum(values)):  # or too large a sum
            self._find_broken(name, rank, steps, values)
        if name not in UNCHARTED:
            self._seen_curves = None
            self._curves.setdefault(name, {}).setdefault(rank, Series()).extend(steps, values)
            self._extremes.setdefault(name, Extremes()).extend(rank, steps, values)

    def _begin_turns(self, name: str) -> None:
        """From now on the metric is of logical ranks; a rank's earlier values belong to its first logical rank."""
        if name not in self._in_turns:
            self._in_turns.add(name)
            of_all: tuple[dict[str, dict[int, Any]], ...] = (self._curves, self._newest, self._broken)
            for by_name in of_all:
                if name in by_name:
                    by_name[name] = {self._first_of(rank): one for rank, one in by_name[name].items()}
            if name in self._extremes:
                self._extremes[name].rows = {
                    self._first_of(rank): one for rank, one in self._extremes[name].rows.items()
                }

    def _first_of(self, rank: int) -> int:
        number = self.params.get("logical_ranks")
        return rank * number // self.size if isinstance(number, int) else rank

    def _continue(self, rank: _Rank, earlier: Mapping[str, float]) -> None:
        """Begin with the totals of the run that this one continues."""
        rank.earlier = earlier.get(SAMPLES, rank.earlier)
        if not self._epochs and {"epoch", "epoch_step"} <= earlier.keys():
            self._epochs.append((earlier["epoch_step"], earlier["epoch"]))

    def _find_broken(self, name: str, rank: int, steps: array[float], values: array[float]) -> None:
        found = self._broken.setdefault(name, {})
        for step, value in zip(steps, values, strict=True):
            if not math.isfinite(value):
                found.setdefault(rank, (step, "NaN" if math.isnan(value) else "inf"))
                return

    def _mark_epochs(self, steps: array[float], values: array[float]) -> None:
        """Keep the steps at which the epoch grows, from the first rank that logs each."""
        for step, value in zip(steps, values, strict=True):
            if not self._epochs or value > self._epochs[-1][1]:
                self._epochs.append((step, value))
        if len(self._epochs) > MOST_EPOCHS:
            self._epochs = self._epochs[::2]

    def _print(self, output: Output) -> None:
        self._printed += 1
        text = output.text[-OUTPUT_CHARACTERS:]
        self._output.append(Printed(self._printed, output.rank, output.stream, text, output.block))
        self._output_characters += len(self._output[-1].text)
        self._dropped_lines += output.text[: -len(text)].count("\n") if text != output.text else 0
        while (over := self._output_characters - OUTPUT_CHARACTERS) > 0:
            oldest = self._output.popleft()
            dropped, left = oldest.text[:over], oldest.text[over:]
            self._output_characters -= len(dropped)
            self._dropped_lines += dropped.count("\n")
            if left:
                self._output.appendleft(oldest._replace(text=left))

    def _clear(self, rank: int) -> None:
        self._displays.clear(rank)
        self._output = deque(piece for piece in self._output if piece.rank != rank)
        self._output_characters = sum(len(piece.text) for piece in self._output)
        self._cleared += 1

    def broken(self) -> bool:
        """Whether a metric has had a value that is not finite."""
        return any(self._broken.values())

    def ended(self) -> dict[int, Ended]:
        """How each rank ended that has ended."""
        return {number: rank.ended for number, rank in self._ranks.items() if rank.ended}

    def statuses(self) -> dict[int, Status]:
        """The newest status of every rank that has sent one."""
        return {number: rank.status for number, rank in self._ranks.items() if rank.status}

    def view(self, now: float) -> RunView:
        """The run at this moment, as a copy that later records do not change."""
        displays, dropped = self._displays.visible()
        if self._seen_curves is None:
            self._seen_curves = _points(self._curves)
            found = {name: one.found() for name, one in self._extremes.items()}
            self._seen_extremes = {name: one for name, (one, _) in found.items() if one is not None}
            self._seen_last = {name: one.value for name, (_, one) in found.items() if one is not None}
        if self._seen_loads is None:
            self._seen_loads = _points(self._loads)
        return RunView(
            size=self.size,
            elapsed=now - self.started,
            names=tuple(self.names),
            curves=self._seen_curves,
            throughput={number: rank.rate.points() for number, rank in self._ranks.items() if rank.rate.total},
            ranks=tuple(
                RankView(
                    rank=number,
                    step=rank.step,
                    last=dict(rank.last),
                    samples=rank.rate.total,
                    samples_per_s=rank.rate.mean() if rank.ended else rank.rate.current(),
                    quiet=now - rank.heard,
                    idle=now - rank.moved,
                    left=rank.left(now),
                    status=rank.status,
                    ended=rank.ended,
                    spent=rank.spent(now - self.started),
                    first=rank.first or 0,
                    epoch=(now - rank.epoch[1], rank.epoch[2]),
                )
                for number, rank in self._ranks.items()
            ),
            newest={name: dict(sorted(by_rank.items())) for name, by_rank in self._newest.items()},
            extremes=self._seen_extremes,
            last=self._seen_last,
            logical=dict(sorted(self._logical.items())),
            in_turns=frozenset(self._in_turns),
            output=tuple(self._output),
            failures=tuple(self.failures),
            displays=displays,
            media=self._media.visible()[0],
            dropped=dropped,
            dropped_lines=self._dropped_lines,
            cleared=self._cleared,
            epochs=tuple(self._epochs),
            loads=self._seen_loads,
            broken={name: dict(ranks) for name, ranks in self._broken.items() if ranks},
            axes={
                number: {name: series.points() for name, series in rank.axes.items()}
                for number, rank in self._ranks.items()
                if rank.axes
            },
            units=dict(self._units),
            knobs=dict(self._knobs),
            changes=tuple(self._changes),
            parted=tuple(self._parted),
        )
