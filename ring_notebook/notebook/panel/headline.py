"""The first lines of a panel and a report: progress of the run, and what is wrong with it, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from ring_notebook.analysis.time_limits import WALLTIME_WARNING
from ring_notebook.machine.energy import energy_text
from ring_notebook.notebook.colors import RED, STATUS_COLORS
from ring_notebook.notebook.panel import machines
from ring_notebook.notebook.panel.time_left import Progress, progress
from ring_notebook.notebook.panel.waits import left_out, left_out_in_loop, stall_sentence
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.record.run_view import EPOCH, RankView, RunView
from ring_notebook.notebook.style import duration, whole, with_code
from ring_notebook.text.words import TRANSPORTS, plural, ranks

_AMBER = STATUS_COLORS["interrupted"]
MOST_BROKEN = 3  # metrics with NaN or infinite values


@dataclass(frozen=True)
class Headline:
    """``status`` in a word, then ``name`` and ``facts``; ``progress`` is the share done, ``left`` the seconds to go.

    If ``part`` is not empty, both are of this part of the run. ``alarms`` are sentences about what is wrong,
    ``warnings`` about what is slow.
    """

    status: str
    name: str
    facts: tuple[str, ...]
    progress: float | None = None
    left: float | None = None
    alarms: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    part: str = ""


def headline(log: RunRecord, view: RunView, stuck: Sequence[RankView] = ()) -> Headline:
    """The headline of a run. With ``stuck``, ranks that have made no progress for long, it has no time left."""
    facts = [*branch_of(log), *_asked_by(log), _on_ranks(log, view), duration(view.elapsed)]
    if view.samples_per_s:
        facts.append(f"{whole(view.samples_per_s)} samples/s")
    facts += [*_speedup(log, view), *_transport(view), *_energy(view)]
    running = log.status == "running"
    batch = _batch_job(log, view) if running else None
    if batch:
        facts.append(f"{duration(batch.left)} until the time limit of {batch.job}")
    if running and (epochs := [rank.last[EPOCH] for rank in view.ranks if EPOCH in rank.last]):
        facts.append(f"epoch {min(epochs):g}")
    alarms = [stall_sentence(stuck, log.code_at)] if stuck else [left_out(view, log.code_at)] if running else []
    alarms += [left_out_in_loop(view)] if running else []
    alarms = [*filter(None, alarms)]
    slow = None if stuck else view.slow
    waits = any(rank.status and rank.status.waiting for rank in stuck)
    done = progress(view, log.source) if running else Progress(None, None)
    return Headline(
        ("stuck" if waits else "no progress") if stuck else "paused" if running and view.paused else log.status,
        log.title,
        tuple(facts),
        done.share,
        None if stuck else done.left,
        (*alarms, *_broken(view)),
        (
            *((slow.sentence,) if slow else ()),
            *_too_long(batch, None if stuck else done.left),
            *machines.warnings(log, view),
        ),
        done.part,
    )


def branch_of(log: RunRecord) -> list[str]:
    """The run and the step at which this one begins, if it is a branch."""
    branch = log.options.get("branch")
    return [f"branch of {branch.get('of')}"] if isinstance(branch, dict) and branch else []


def _asked_by(log: RunRecord) -> list[str]:
    """Who has asked for the run, if not its notebook."""
    who = log.options.get("who")
    return [f"asked by {who}"] if isinstance(who, str) and who else []


def _on_ranks(log: RunRecord, view: RunView) -> str:
    """How many ranks, and logical ranks, and which of the cluster if the cell runs only on some."""
    only, chosen = log.options.get("only"), log.options.get("ranks")
    if isinstance(only, list) and only and all(isinstance(rank, int) for rank in only):
        return f"{ranks(only)} of {view.size}"
    logical = log.params.get("logical_ranks")
    count = plural(view.size, "rank")
    if view.logical and isinstance(logical, int):
        count = f"{plural(logical, 'logical rank')} on {count}"
    if isinstance(chosen, list) and chosen and all(isinstance(rank, int) for rank in chosen):
        return f"{count} ({ranks(chosen)} of the cluster)"
    return count


def _speedup(log: RunRecord, view: RunView) -> list[str]:
    """How much faster than one rank, if %%ringscale has measured one before."""
    one = log.options.get("one_rank")
    if log.status != "ok" or log.size == 1 or not isinstance(one, int | float) or not one > 0 or not view.samples_per_s:
        return []
    return [f"{view.samples_per_s / one:.2g}x one rank, measured by %%ringscale"]


def _transport(view: RunView) -> list[str]:
    """What moves tensors on GPUs between the ranks, once a rank has reported it."""
    ways = [rank.status.extra.get("transport") for rank in view.ranks if rank.status]
    return next(([text] for way, text in TRANSPORTS.items() if way in ways), [])


def _energy(view: RunView) -> list[str]:
    """The energy that the run has used, if it was measured; the report says under Machine why it was not."""
    used = view.energy
    return [] if used.joules is None else [energy_text(used)]


class _BatchJob(NamedTuple):
    job: str
    left: float


def _batch_job(log: RunRecord, view: RunView) -> _BatchJob | None:
    """The batch job that the ranks run in, and the seconds it has left, if the batch system limits them."""
    batch = log.environment.get("batch")
    if not isinstance(batch, dict) or not isinstance(batch.get("end"), int | float):
        return None
    return _BatchJob(str(batch.get("job")), max(0.0, batch["end"] - log.started - view.elapsed))


def _too_long(batch: _BatchJob | None, left: float | None) -> list[str]:
    """A warning if the run, with ``left`` seconds to go, may not end before its batch job."""
    if batch is None or (batch.left > WALLTIME_WARNING and (left is None or left <= batch.left)):
        return []
    needs = f", and this run takes {duration(left)} more" if left is not None and left > batch.left else ""
    return [f"{batch.job} reaches its time limit in {duration(batch.left)}{needs}; save a checkpoint before"]


def _broken(view: RunView) -> list[str]:
    found = []
    for name, by_rank in list(view.broken.items())[:MOST_BROKEN]:
        first, kind = min(by_rank.values())
        newest, who = view.newest.get(name, {}), view.whose(name, by_rank)
        if all(math.isfinite(newest[rank]) for rank in by_rank):
            found.append(f"{name} was {kind} on {who} at step {first:,.0f}, and has numbers again")
        else:
            found.append(f"{name} is {kind} on {who} since step {first:,.0f}")
    return found


def html(content: Headline) -> str:
    """The headline for a page; readable even if the page removes styles."""
    return first_row(content) + alarms(content)


def first_row(content: Headline) -> str:
    """The headline without its sentences."""
    color = RED if content.status in ("stuck", "no progress") else STATUS_COLORS.get(content.status, "inherit")
    parts = [f"<span class='ring-status' style='color:{color}'>● {content.status}</span>"]
    parts.append(f"<b>{escape(content.name)}</b>")
    if content.progress is not None:
        bar = f"<span class='ring-bar'><i style='width:{content.progress:.1%}'></i></span>"
        of = f" of {escape(content.part)}" if content.part else ""
        parts.append(f"<span>{bar}{content.progress:.0%}{of}</span>")
    if content.left is not None:
        parts.append(f"<b>{duration(content.left)} left</b>")
    parts += [f"<span>{escape(fact)}</span>" for fact in content.facts]
    first, *more = parts
    # Each dot belongs to the part after it: the style sheet hides a dot at the beginning of a line.
    rest = "".join(f"<span><span class=ring-dot> · </span>{part}</span>" for part in more)
    return f"<div class='ring-head'>{first}{rest}</div>"


def alarms(content: Headline, live: bool = False) -> str:
    """Sentences about what is wrong and what is slow, one per line. On a ``live`` page screen readers say alarms."""
    lines = []
    for sentence, shade in [*((one, RED) for one in content.alarms), *((one, _AMBER) for one in content.warnings)]:
        role = " role='alert'" if shade == RED and live else ""
        lines.append(f"<div class='ring-alarm' style='color:{shade}'{role}>▲ {with_code(sentence)}</div>")
    return "".join(lines)


def text(content: Headline) -> str:
    """The headline for a terminal: ``ok · digits · 2 ranks · 45 s · 1,326 samples/s``."""
    first = " · ".join([content.status, content.name, *content.facts])
    return "\n".join([first, *content.alarms, *content.warnings])
