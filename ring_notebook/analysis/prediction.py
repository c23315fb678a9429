"""Predicts sizes that were not measured: a model of one step, fitted to runs of other sizes.

    step    = compute + waiting + moving
    compute = (fixed + per_sample · samples of a rank) · max(1, ranks of a host / its cores)
    waiting = spread · compute · E(ranks)
    moving  = within · ranks of a host + max(0, between - overlap · compute)
    between = 2(h-1)/h · bytes / rate + 2(h-1) · hop              for h hosts

``between`` is the ring of the hosts: each sends 2(h-1)/h of the bytes, in 2(h-1) messages that follow one another. The
ranks of a host share its link. The slowest rank of a step is the largest of as many draws as there are ranks: E(n) is
the expected maximum of n standard normal draws.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from statistics import NormalDist, fmean, median
from typing import Annotated

from ring_notebook.analysis.scaling import PARTS, Kind, Measured, Scaling, batches, cause, kind_of, measure, rank_counts
from ring_notebook.text.line_options import Option, count
from ring_notebook.text.words import plural, rate_text

BACKWARD = 2 / 3
"""The part of compute that can hide communication: backward takes about twice as long as forward."""
_DISTINCT = 1.1  # least ratio of two batches that tells fixed time from time per sample
_USELESS = 2.0  # a model this far off what it was fitted to predicts nothing
_ROUNDED = 0.005  # efficiencies closer than this look the same
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True)
class StepModel:
    """The parameters of a step, as in the text above: seconds, bytes and bytes per second.

    ``cores``: of each host, or 0 where ranks compute on GPUs, which they do not share.
    """

    per_sample: float
    fixed: float = 0.0
    cores: int = 0
    spread: float = 0.0
    within: float = 0.0
    bytes: float = 0.0
    rate: float = inf
    hop: float = 0.0
    overlap: float = 0.0

    def step(self, ranks: int, hosts: int, samples: float) -> dict[str, float]:
        """Seconds of a step with ``samples`` on each rank, by part: compute, waiting, moving."""
        local = ceil(ranks / hosts)
        compute = (self.fixed + self.per_sample * samples) * turns(local, self.cores)
        between = 2 * (hosts - 1) / hosts * self.bytes / self.rate + 2 * (hosts - 1) * self.hop
        moving = (self.within * local if local > 1 else 0.0) + max(0.0, between - self.overlap * compute)
        return {"compute": compute, "waiting": self.spread * compute * expected_maximum(ranks), "moving": moving}

    def __str__(self) -> str:
        """The parameters that tell something, for a user."""
        parts = [f"{1e3 * self.per_sample:.3g} ms of compute a sample"]
        parts += [f"{1e3 * self.fixed:.3g} ms of every step"] if self.fixed else []
        parts += [f"ranks differ by {self.spread:.1%}"]
        if self.rate < inf:
            parts += [f"{self.bytes / 1e6:.3g} MB a step over links of {rate_text(self.rate)}"]
        parts += [f"{1e6 * self.hop:.3g} µs from host to host"] if self.hop else []
        parts += [f"{self.overlap:.0%} of compute hides communication"] if self.overlap else []
        return ", ".join(parts)


def turns(local: int, cores: int) -> float:
    """How many times as long ``local`` ranks take on the cores of one host, of which each needs one."""
    return max(1.0, local / cores) if cores else 1.0


def expected_maximum(n: int) -> float:
    """Of ``n`` standard normal draws, within 0.03 (Blom 1958)."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0


def link_rate(text: str) -> float:
    """Bytes per second of ``25Gbit``, ``800Mbit/s``, ``1.5gbps``, or of ``3GB/s`` in bytes. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(?:bit(?:/s)?|bps|(?-i:(B)/s))", text.strip(), re.IGNORECASE)
    if not found or not float(found[1]):
        raise ValueError(f"expected the rate of a host's network such as 25Gbit or 3GB/s, got {text!r}")
    return float(found[1]) * _UNITS[found[2].lower()] / (1 if found[3] else 8)


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """What a user may ask of a measurement; ``link`` is in bytes per second."""

    repeat: Annotated[int, Option("--repeat N", "run each size N times; show the median", count)] = 1
    warmup: Annotated[int, Option("--warmup N", "steps at the beginning not to count", count)] = 1
    kind: Annotated[
        Kind,
        Option("--strong", "the global batch is to stay the same", const="strong", exclusive=True),
        Option("--weak", "it is to grow with the ranks", const="weak", exclusive=True),
    ] = ""
    csv: Annotated[str, Option("--csv FILE", "write the numbers to this file")] = ""
    predict: Annotated[Sequence[int], Option("--predict 8,64", "sizes to predict from the others", rank_counts)] = ()
    link: Annotated[
        float | None, Option("--link 25Gbit", "rate of each host's network, to predict with", link_rate)
    ] = None
    gpus_per_host: Annotated[int | None, Option("--gpus-per-host N", "ranks of each host, to predict with", count)] = (
        None
    )


def fit(runs: Sequence[Measured], link: float | None = None) -> StepModel:
    """The model of these runs, which all have samples; ``link``: bytes per second of a host, where the user knows it.

    With a ``link``, the rest of the time between hosts goes to hops, or is hidden behind compute. Without one, it is
    divided between rate and hops, and hidden time makes the link look faster.
    """
    cores = runs[0].cores
    # Ranks on CPUs share cores, caches and threads: those of the fullest hosts are most like those of more hosts.
    fullest = max(_local(run) for run in runs)
    alike = [run for run in runs if not cores or _local(run) == fullest]
    per_sample, fixed = _line([(run.batch / run.ranks, _compute(run)) for run in alike])
    model = StepModel(per_sample, fixed, cores, bytes=median(run.posted for run in runs))
    # Ranks that take turns on cores wait for one another whatever they compute.
    several = [run for run in runs if run.ranks > 1]
    calm = [run for run in several if not cores or _local(run) <= cores] or several
    waits = [run.shares["waiting"] * run.step / (_alone(run) * expected_maximum(run.ranks)) for run in calm]
    inside = [_moving(run) / _local(run) for run in calm if run.hosts == 1]
    model = replace(model, spread=_median(waits), within=_median(inside))
    far = [run for run in runs if run.hosts > 1]
    seen = [(run, max(0.0, _moving(run) - (model.within * _local(run) if _local(run) > 1 else 0.0))) for run in far]
    model = replace(model, bytes=_median([run.posted for run in far]) or model.bytes)
    if link is not None:
        model = replace(model, rate=link, overlap=0.0 if cores else BACKWARD)
        rest = [(run, moving - 2 * (run.hosts - 1) / run.hosts * model.bytes / link) for run, moving in seen]
        if not rest:
            return model
        hidden = _median([-left / _alone(run) for run, left in rest])
        hop = _median([left / (2 * (run.hosts - 1)) for run, left in rest])
        return replace(model, hop=max(0.0, hop), overlap=min(1.0, max(0.0, hidden)))
    if not seen:
        return model
    slowness, hop = _two_terms(
        [(2 * (run.hosts - 1) / run.hosts * model.bytes, 2.0 * (run.hosts - 1), moving) for run, moving in seen]
    )
    return replace(model, rate=1 / slowness if slowness > 0 else inf, hop=hop)


def predict(
    runs: Sequence[Measured],
    sizes: Sequence[int],
    link: float | None = None,
    per_host: int | None = None,
    kind: Kind = "",
) -> tuple[list[Scaling], str]:
    """Predict ``sizes`` from runs of other sizes, and say in a sentence from what; runs of these sizes only compare.

    ``per_host``: ranks of each host, by default the most that were measured on one; where no network is known, all. The
    interval of an efficiency spans the models that leave one run or one size out, widened by what the model is off on
    the sizes that it was fitted to; where a link is given and no run has crossed one, also whether nothing or all of
    backward hides communication. An efficiency is at most the best measured one or 1, unless the smallest size shared
    cores or a network that this size does not share: a model that gives more shows that the smallest size was held up.
    Raises ValueError where the runs do not tell enough, or are too noisy for any model.
    """
    known = [run for run in runs if run.ranks not in sizes]
    if not known:
        raise ValueError("--predict names every measured size; measure at least one other")
    if not all(run.rate for run in runs):
        raise ValueError("no samples are known; let each step call ring.log(samples=...), or use ring.track")
    strong, weak = batches(known) if len({run.ranks for run in known}) > 1 else (kind == "strong", kind != "strong")
    if not strong and not weak:
        raise ValueError("expected the same global batch at all sizes, or the same batch on each rank")
    base = min(known, key=lambda run: run.ranks)
    pace = median(run.rate for run in known if run.ranks == base.ranks)
    batch = median(run.batch for run in known if run.ranks == base.ranks)
    crossed = _crosses(known)
    each = per_host or (max(_local(run) for run in known) if crossed or link is not None else max(sizes))

    def rate_of(model: StepModel, ranks: int, hosts: int) -> float:
        whole = batch if strong else batch / base.ranks * ranks
        return whole / sum(model.step(ranks, hosts, whole / ranks).values())

    best = max(measure(known), key=lambda point: point.efficiency)
    model = fit(known, link)
    models = [model, *_other_models(known, link, model)]
    off = max(abs(rate_of(model, run.ranks, run.hosts) / _rate(known, run.ranks) - 1) for run in known)
    if off > _USELESS:
        raise ValueError(
            f"the model of a step is off by {off:.0%} on a size that was measured; measure longer, with --repeat 3, "
            "while nothing else runs"
        )
    points, more = [], []
    for ranks in sorted(set(sizes)):
        hosts = ceil(ranks / each)
        if hosts > 1 and link is None and not crossed:
            raise ValueError(
                f"{ranks} ranks are more than the {each} of one host, and no run has crossed a network; "
                "give the rate of a host's network, such as --link 25Gbit, or measure a size over several hosts"
            )
        whole = batch if strong else batch / base.ranks * ranks
        parts = model.step(ranks, hosts, whole / ranks)
        step = sum(parts.values())
        shares = {**dict.fromkeys(PARTS, 0.0), **{name: seconds / step for name, seconds in parts.items()}}
        ideal = pace * ranks / base.ranks
        reached = [rate_of(one, ranks, hosts) / ideal for one in models]
        freed = rate_of(model, ranks, hosts) / ranks * base.ranks / rate_of(model, base.ranks, base.hosts)
        most = max(1.0, best.efficiency, freed)
        efficiency, high = min(reached[0], most), min(max(reached) * (1 + off), most)
        more += _above_ideal(ranks, hosts, reached[0], high, base, best, freed)
        points.append(
            Scaling(
                ranks,
                base.seconds / base.step * whole / (efficiency * ideal),
                efficiency * ideal,
                whole,
                0.0,
                efficiency * ranks / base.ranks,
                efficiency,
                shares,
                (min(min(reached) / (1 + off), efficiency), high),
            )
        )
    lines = [f"Predicted from {', '.join(map(str, sorted({run.ranks for run in known})))} ranks: {model}."]
    for point in points:
        if compared := [run for run in runs if run.ranks == point.ranks]:
            got = _rate(runs, point.ranks)
            few = next((run.cores * run.hosts for run in compared if 0 < run.cores * run.hosts < run.ranks), 0)
            shared = f", because the measured ones took turns on {plural(few, 'core')}" if few else ""
            lines.append(
                f"{point.ranks} ranks: predicted {point.rate:,.0f} samples/s, measured {got:,.0f}: "
                f"off by {abs(point.rate / got - 1):.0%}{shared}."
            )
    return points, "\n".join([*lines, *more])


def _above_ideal(
    ranks: int, hosts: int, reached: float, high: float, base: Measured, best: Scaling, freed: float
) -> list[str]:
    """Why ``ranks`` are predicted to reach more than 100%, up to ``high``, or were cut to less than the model gives."""
    first = plural(base.ranks, "rank")
    lines = []
    if reached > high + _ROUNDED:
        lines.append(
            f"{plural(ranks, 'rank')}: the model gives {reached:.0%} of ideal scaling, because it has {first} faster "
            f"than measured; it is cut to {high:.0%}. Measure {first} again, with --repeat 3."
        )
    if high > 1 + _ROUNDED:
        why = f"because {first} shared cores or a network as {ranks} on {plural(hosts, 'host')} would not"
        if freed < best.efficiency:
            why = f"as {plural(best.ranks, 'rank')} were measured at {best.efficiency:.0%}"
        lines.append(f"{plural(ranks, 'rank')}: more than 100%, {why}.")
    return lines


def _other_models(runs: Sequence[Measured], link: float | None, model: StepModel) -> list[StepModel]:
    """Other models that the runs allow besides ``model``, which fits all of them: see `predict`."""
    without = [[other for other in runs if other is not run] for run in runs]
    without += [[other for other in runs if other.ranks != run.ranks] for run in runs]
    models = [fit(rest, link) for rest in without if rest and (link is not None or _crosses(rest) == _crosses(runs))]
    if link is not None and not _crosses(runs):
        models += [replace(model, overlap=overlap) for overlap in (0.0, BACKWARD)]
    return models


def compare(runs: Sequence[Measured], asked: ScalingOptions) -> tuple[list[Scaling], list[str]]:
    """The scaling of ``runs`` with the predicted sizes, and what there is to say of it, in lines."""
    points = measure(runs)
    last = max(runs, key=lambda run: run.ranks)
    notes = [cause(points, last.cores * last.hosts), kind_of(points, asked.kind)]
    if asked.predict:
        try:
            predicted, note = predict(runs, asked.predict, asked.link, asked.gpus_per_host, asked.kind)
        except ValueError as error:  # what was measured, perhaps for hours, is shown all the same
            predicted, note = [], f"Not predicted: {error}"
        points = sorted([*points, *predicted], key=lambda one: one.ranks)
        notes.append(note)
    return points, [note for note in notes if note]


def _rate(runs: Sequence[Measured], ranks: int) -> float:
    return median(run.rate for run in runs if run.ranks == ranks)


def _crosses(runs: Sequence[Measured]) -> bool:
    return any(run.hosts > 1 for run in runs)


def _local(run: Measured) -> int:
    return ceil(run.ranks / run.hosts)


def _compute(run: Measured) -> float:
    """Seconds of a step outside of collectives, had each rank a core of its own."""
    return _alone(run) / turns(_local(run), run.cores)


def _alone(run: Measured) -> float:
    """Seconds of a step outside of collectives, in which ranks may have taken turns."""
    return max(1e-9, sum(run.shares[part] for part in ("compute", "asleep", "off_core", "data", "bubble")) * run.step)


def _moving(run: Measured) -> float:
    return run.shares["moving"] * run.step


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and beginning, neither below 0, of the line through (samples, seconds); of one size, no beginning."""
    xs = [x for x, _ in points]
    slope = median(y / x for x, y in points)
    if max(xs) < _DISTINCT * min(xs):
        return slope, 0.0
    mean_x, mean_y = fmean(xs), fmean(y for _, y in points)
    steep = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x in xs)
    if steep < 0:
        return 0.0, mean_y
    return (steep, mean_y - steep * mean_x) if steep * mean_x <= mean_y else (slope, 0.0)


def _two_terms(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The a and b, neither below 0, with which a·x + b·y comes nearest to z, in parts of z."""
    rows = [(x / z, y / z) for x, y, z in points if z > 0]
    xx, yy, xy = (sum(one[i] * one[j] for one in rows) for i, j in ((0, 0), (1, 1), (0, 1)))
    x1, y1 = sum(x for x, _ in rows), sum(y for _, y in rows)
    tried = [(x1 / xx if xx else 0.0, 0.0), (0.0, y1 / yy if yy else 0.0)]
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        tried.append(((x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant))

    def far(one: tuple[float, float]) -> float:
        return sum((one[0] * x + one[1] * y - 1) ** 2 for x, y in rows)

    return min((one for one in tried if min(one) >= 0), key=far)
