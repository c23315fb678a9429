"""Reads a run into the answers of the laboratory: its verdict and its curves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ring_notebook.analysis.slow_ranks_and_links import SlowLink
from ring_notebook.errors import RingError
from ring_notebook.notebook.lab.answers import (
    MOST_CHARACTERS,
    Curve,
    Curves,
    Failed,
    RunVerdict,
    Slow,
    Value,
    clean,
    from_ranks,
)
from ring_notebook.notebook.panel.charts.chart import results
from ring_notebook.notebook.panel.charts.curves import mean_line
from ring_notebook.notebook.panel.headline import headline
from ring_notebook.notebook.panel.labelled_lines import Line, Lines
from ring_notebook.notebook.panel.waits import stuck
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.record.run_view import RunView
from ring_notebook.notebook.run.failures import STOPPED, grouped, line_of, own_failures, primary, stopped
from ring_notebook.text.words import first_names, rank_list
from ring_notebook.text.words import ranks as rank_text

_MOST_VALUES = 12  # metrics, knobs and hyper-parameters
_MOST_OUTPUT = 5
_MOST_POINTS = 1000


def verdict(log: RunRecord, view: RunView, ended_by: str = "") -> RunVerdict:
    """The verdict on a run at the moment of ``view``; ``ended_by`` says who or what has stopped it."""
    stalled = stuck(view) if log.status == "running" else ()
    head = headline(log, view, stalled)
    failures = view.failures if log.status == "failed" or log.status == "running" else ()
    others = _others(view) if failures else []
    memory = {
        rank: max(points.y) for rank, points in view.loads.get("memory", {}).items() if len(points.y) and max(points.y)
    }
    most = max(memory, key=memory.__getitem__, default=0)
    names = sorted(view.charted, key=lambda name: (name not in view.broken, list(view.charted).index(name)))
    reason = str(log.summary.get("error", ""))
    return RunVerdict(
        run=log.run,
        name=clean(log.title, 80),
        status="stuck" if head.status in ("stuck", "no progress") else head.status,
        ranks=log.size,
        seconds=round(view.elapsed, 3),
        step=view.step,
        samples_per_s=view.samples_per_s,
        progress=head.progress,
        seconds_left=head.left,
        asked_by=clean(log.options.get("who", ""), 80),
        ended_by=ended_by,
        error=_failed(view, log),
        reason=from_ranks(reason),
        operation=from_ranks(next((one for one in map(_operation, others) if one), "")),
        others=tuple(from_ranks(one) for one in others[:_MOST_VALUES]),
        alarms=tuple(from_ranks(one) for one in (*head.alarms, *log.trouble.splitlines())[:_MOST_VALUES]),
        slow=_slow(view),
        metrics={clean(name, 60): _value(view, name) for name in names[:_MOST_VALUES]},
        more_metrics=max(0, len(names) - _MOST_VALUES),
        knobs={clean(name, 60): _plain(knob.value) for name, knob in list(view.knobs.items())[:_MOST_VALUES]},
        params={clean(name, 60): _plain(value) for name, value in list(log.params.items())[:_MOST_VALUES]},
        memory=memory.get(most),
        memory_rank=most,
        joules=view.energy.joules,
        joules_per_sample=view.energy.per_sample,
        output=tuple(from_ranks(one) for one in printed(view)[-_MOST_OUTPUT:]),
        directory=str(log.directory),
    )


def _plain(value: object) -> float | str | bool:
    return value if isinstance(value, bool | int | float) else clean(value, 120)


def _failed(view: RunView, log: RunRecord) -> Failed | None:
    """The first failure, with all ranks that share it."""
    if not view.failures:
        return None
    first, ranks = grouped(primary(view.failures))[0]
    line = line_of(first)
    code = next((code for file, at, _, code in reversed(first.frames) if file == "<cell>" and at == line), "")
    shown = from_ranks(code or log.code_at(line))
    return Failed(clean(first.ename, 80), from_ranks(first.message), tuple(sorted(ranks)), line, shown)


def _others(view: RunView) -> list[str]:
    """What the other ranks did: their errors, where they stopped because of another rank, or their status."""
    _, *more = grouped(primary(view.failures))
    lines = [f"{rank_text(ranks)}: {other.ename} at line {line_of(other)}: {other.message}" for other, ranks in more]
    lines += stopped(view.failures) if own_failures(view.failures) else []
    told = {one.rank for one in view.failures}
    for rank in view.ranks:
        if rank.rank not in told and rank.ended is not None:
            lines.append(f"rank {rank.rank}: {rank.ended.status}")
    return lines


def _operation(text: str) -> str:
    """The collective in which a rank stopped because of another one; empty if unknown."""
    before, stopped, _ = text.partition(STOPPED)
    return before.rpartition(": ")[2] if stopped else ""


def _slow(view: RunView) -> Slow | None:
    slow = view.slow
    if slow is None:
        return None
    if isinstance(slow, SlowLink):
        return Slow((slow.source, slow.to), "link", slow.factor, slow.moving, slow.sentence)
    return Slow(slow.ranks, slow.cause, slow.factor, slow.waits, slow.sentence)


def _value(view: RunView, name: str) -> Value:
    last, best = results(view, name)
    step, value = best if best is not None else (None, None)
    broken = view.broken.get(name, {})
    at, kind = min(broken.values(), default=(None, ""))
    return Value(
        last, value, step, kind, at, tuple(sorted(broken))[:_MOST_VALUES], bool(broken) and name in view.in_turns
    )


def printed(view: RunView) -> list[str]:
    """What ranks have printed, as far as it is in memory, each line after its ranks."""
    lines: Sequence[Line] = Lines().take(view.output, last=True)
    return [f"[{rank_list(line.ranks)}] {text}" for line in lines for text in line.text.splitlines()]


def curves(log: RunRecord, names: Sequence[str] = (), points: int = 100) -> Curves:
    """The curves of these metrics, by default of the first ones. Raises RingError for one that was not logged."""
    view = log.view()
    if missing := [name for name in names if name not in view.curves]:
        known = clean(first_names(view.charted), MOST_CHARACTERS) or "none"
        raise RingError(f"no metric {clean(missing[0], 60)!r} was logged; there are: {known}")
    if not 1 <= points <= _MOST_POINTS:
        raise RingError(f"points={points}: expected 1 to {_MOST_POINTS}")
    chosen = [*names][:_MOST_VALUES] or view.charted[:_MOST_VALUES]
    return Curves(log.run, {clean(name, 60): _curve(view, name, points) for name in chosen if name in view.curves})


def _curve(view: RunView, name: str, points: int) -> Curve:
    line = mean_line("", view.curves[name], "")
    parts = range(0, len(line.x), -(-len(line.x) // points) or 1)
    each = parts.step
    thin = [[float(np.mean(of[at : at + each])) for at in parts] for of in (line.x, line.y)]
    return Curve(tuple(thin[0]), tuple(one if np.isfinite(one) else None for one in thin[1]))
