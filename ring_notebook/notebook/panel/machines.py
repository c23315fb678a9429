"""The load of the machines: sparklines for the table, charts, and warnings before something runs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ring_notebook.notebook.panel.charts.chart import Chart
from ring_notebook.notebook.panel.charts.curves import per_rank
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.record.run_view import RunView
from ring_notebook.notebook.record.series import Points
from ring_notebook.notebook.record.tags_and_look import Look
from ring_notebook.notebook.style import blocks, duration, number
from ring_notebook.text.words import plural, ranks

COLUMNS = {"cpu": "CPU", "memory": "memory", "gpu": "GPU", "gpu_memory": "GPU mem"}  # of the table
_TITLES = {
    "cpu": ("CPU", "% of a core", 1.0),
    "memory": ("memory", "GiB of each rank", 2.0**-30),
    "gpu": ("GPU", "% busy", 1.0),
    "gpu_memory": ("GPU memory", "GiB in use", 2.0**-30),
    "disk": ("disk", "MB/s of each rank", 1e-6),
    "network": ("network", "MB/s of each host", 1e-6),
}
_SPARKS = 8  # characters
SOON = 300.0  # seconds until memory runs out
_READINGS, _SPAN = 10, 8.0  # least number of readings, and of seconds, for a trend
_REACH = 5.0  # a trend counts for this many times its length: a training takes more memory at its start
IDLE, STARVED = 60.0, 0.25  # a GPU is less busy than so many percent; its rank waits for data that share of time


def _parts(values: Sequence[float]) -> list[float]:
    """The means of consecutive parts of the values, one part per character of a sparkline."""
    count = min(_SPARKS, len(values))
    edges = [len(values) * index // count for index in range(count + 1)]
    return [sum(values[first:last]) / (last - first) for first, last in pairwise(edges)]  # plain Python: few numbers


def cells(view: RunView) -> dict[int, list[str]]:
    """The cells of every rank, one for each known column of COLUMNS: a sparkline and the newest value."""
    made: dict[int, list[str]] = {rank.rank: [] for rank in view.ranks}
    for name in COLUMNS:
        by_rank = view.loads.get(name)
        if not by_rank:
            continue
        highest = max(map(_highest, by_rank.values()))
        top = max(100.0, highest) if name in ("cpu", "gpu") else 1.4 * highest
        expected = view.loads.get(f"{name}_expected", {})
        for rank, of_rank in made.items():
            most = f" of ~{_gib(float(expected[rank].y[-1]))}" if rank in expected else ""
            of_rank.append(_cell(name, by_rank[rank], top) + most if rank in by_rank else "")
    return made


# A load is summed up again only when there is a new reading of it: a table is drawn five times a second.
@lru_cache(maxsize=1024)
def _highest(points: Points) -> float:
    return max(points.y)


@lru_cache(maxsize=1024)
def _cell(name: str, points: Points, top: float) -> str:
    """A sparkline up to ``top`` and the newest value."""
    newest = f"{points.y[-1]:.0f}%" if name in ("cpu", "gpu") else f"{_gib(points.y[-1])} GiB"
    return f"{blocks(_parts(points.y), 0.0, top) if top > 0 else ''} {newest}"


def _gib(value: float) -> str:
    return f"{value * 2**-30:.3g}"


def charts(view: RunView, look: Look) -> list[Chart]:
    """A chart of each load over the seconds of the run."""
    made = []
    for name, (title, unit, factor) in _TITLES.items():
        by_rank = {rank: _scaled(points, factor) for rank, points in view.loads.get(name, {}).items()}
        if any(len(points.x) > 1 for points in by_rank.values()):
            made.append(Chart(title, unit, "seconds", per_rank(by_rank, look.smooth, look.ranks), from_zero=True))
    return made


def _scaled(points: Points, factor: float) -> Points:
    scaled = points.y[:]
    for index, value in enumerate(scaled):
        scaled[index] = value * factor
    return Points(points.x, scaled)


def warnings(log: RunRecord, view: RunView) -> tuple[str, ...]:
    """Warnings about what will fail, or costs time, because of the machines."""
    return (*_running_out(view), *_shared_cores(log, view), *_starved(view))


def _running_out(view: RunView) -> list[str]:
    """What runs out soon, also of a run that failed, maybe because of it; nothing for a run that ended well."""
    if all(rank.ended and rank.ended.status == "ok" for rank in view.ranks):
        return []
    found = []
    for name, what in (("memory_left", "memory"), ("gpu_memory_left", "GPU memory")):
        times = {rank: left for rank, line in view.loads.get(name, {}).items() if (left := _seconds_left(line))}
        if times:
            rank = min(times, key=times.__getitem__)
            left = view.loads[name][rank].y[-1] * 2**-30
            text = f"{what} runs out in about {duration(times[rank])}: {number(left)} GiB left where rank {rank} runs"
            found.append(text)
    return found


def _seconds_left(points: Points) -> float | None:
    """Seconds until a falling amount reaches 0, by the line through its newest readings; None when that is far off."""
    x, y = np.asarray(points.x[-6 * _READINGS :]), np.asarray(points.y[-6 * _READINGS :])
    if len(x) < _READINGS or x[-1] - x[0] < _SPAN:
        return None
    slope, start = np.polyfit(x, y, 1)
    noise = float(np.abs(y - (slope * x + start)).mean())
    fallen = -slope * (x[-1] - x[0])
    # It must fall steadily, not in one jump: a model takes memory at its first step only.
    if np.median(np.diff(y)) >= 0 or slope >= 0 or fallen < 4 * noise or fallen < 0.01 * y[-1]:
        return None
    left = float(y[-1] / -slope)
    return left if left < min(SOON, _REACH * float(x[-1] - x[0])) else None


def _shared_cores(log: RunRecord, view: RunView) -> list[str]:
    about = log.environment
    cores = about.get("cores", 0) * max(1, len(about.get("hosts", ())))
    if about.get("gpus") or not isinstance(cores, int) or not cores:
        return []
    if log.size > cores:
        return [f"{plural(log.size, 'rank')} share {plural(cores, 'core')}: each computes more slowly than alone"]
    threads = sum(int(points.y[-1]) for points in view.loads.get("threads", {}).values())
    if threads <= cores:
        return []
    return [
        f"{plural(log.size, 'rank')} compute with {plural(threads, 'thread')} on {plural(cores, 'core')}, which wait "
        "for one another: unset OMP_NUM_THREADS and MKL_NUM_THREADS in the notebook, then `%ring restart`"
    ]


def _starved(view: RunView) -> list[str]:
    busy: Mapping[int, Points] = view.loads.get("gpu", {})
    starved = {
        rank.rank: rank.spent.share(rank.spent.data)
        for rank in view.ranks
        if rank.rank in busy
        and len(busy[rank.rank].y) >= _READINGS
        and float(np.mean(busy[rank.rank].y[-_READINGS:])) < IDLE
        and rank.spent.share(rank.spent.data) > STARVED
    }
    if not starved:
        return []
    gpus, idle = ("GPU", "idles") if len(starved) == 1 else ("GPUs", "idle")
    return [f"the {gpus} of {ranks(starved)} {idle}: {max(starved.values()):.0%} of the time goes to waiting for data"]
