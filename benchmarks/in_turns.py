"""Variants of a training step that take turns in one run, for `tensorflow_steps.py` and `keras_steps.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from time import perf_counter, process_time
from typing import Any

Turn = Callable[[], list[float]]
"""Makes some steps, and returns the seconds of each, or their mean."""
Figures = tuple[list[float], float]
"""The quartiles of a step's seconds, and its processor seconds."""


def measure(ring: Any, turns: Mapping[str, Turn], steps: int, seconds: float) -> dict[str, Figures]:
    """For each variant, whose turn has ``steps`` steps, the figures of the slowest rank; ``ring`` is a face of ours."""
    for _ in range(2):  # what is compiled, or allocated, once
        for turn in turns.values():
            turn()
    times: dict[str, list[float]] = {name: [] for name in turns}
    busy: dict[str, list[float]] = {name: [] for name in turns}
    began = perf_counter()
    while True:
        for name, turn in turns.items():
            ring.barrier()
            used = process_time()
            times[name] += turn()
            busy[name].append((process_time() - used) / steps)
        if ring.broadcast_object(perf_counter() - began > seconds and len(busy["alone"]) >= 5):
            break
    own = {name: (quantiles(times[name], n=4), median(busy[name])) for name in turns}
    ranks = ring.allgather_object(own)
    return {name: max((rank[name] for rank in ranks), key=lambda figures: figures[0][1]) for name in turns}


def print_head(ring: Any, framework: str) -> None:
    """What was measured, and the head of the table."""
    print(f"{ring.size()} ranks, {framework}, load {os.getloadavg()[0]:.0f}\n")
    print("| model | variant | step | quartiles | processor time |\n|---|---|---|---|---|")


def print_rows(model: str, result: Mapping[str, Figures]) -> None:
    """A row for each variant; in parentheses the part that the variant "alone", or "alone, fit", does not need."""
    for name, ((low, middle, high), busy) in result.items():
        (_, own, _), own_busy = result["alone, fit" if name.endswith(", fit") else "alone"]
        shares = [f" ({1 - least / figure:.0%})" for least, figure in ((own, middle), (own_busy, busy))]
        if name.startswith("alone"):
            shares = ["", ""]
        print(
            f"| {model} | {name} | {middle * 1e3:.1f} ms{shares[0]} | {low * 1e3:.1f} to {high * 1e3:.1f} | "
            f"{busy * 1e3:.1f} ms{shares[1]} |",
            flush=True,
        )
