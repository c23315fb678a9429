"""What it costs to record a timeline: small allreduces and training steps with the recorder on and off, in turn.

    ringrun -np 2 python benchmarks/recording.py [--models gpt,conv] [--seconds 10]

An allreduce of 4 B is the worst case, because nothing hides its events. ``difference`` is the median over turns of what
neighbours differ by, with the interval in which half of them lie. Steps vary by more than their events cost, so
``counted`` is the number of events times what one costs the allreduce of 4 B, as a share of the step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter

import torch
from training import MODELS, OPTIMIZERS, step_of

import ring_notebook.torch as ring
from ring_notebook.core import world


def timed(call: Callable[[], object], repeats: int, *, on: bool) -> tuple[float, float]:
    """Seconds and recorded events per call, all ranks beginning together."""
    recorder = world.current().communicator
    if on:
        recorder.record()
    ring.barrier()
    start = perf_counter()
    for _ in range(repeats):
        call()
    seconds = (perf_counter() - start) / repeats
    events = len(recorder.recorded()) if on else 0
    return seconds, events / repeats


def compare(call: Callable[[], object], repeats: int, seconds: float) -> tuple[list[float], list[float], float]:
    """Seconds per call without and with the recorder, turn by turn, and the events of a call."""
    events = 0.0
    off: list[float] = []
    on: list[float] = []
    began = perf_counter()
    while True:
        # Each is first as often as the other is.
        for recorded in (False, True) if len(off) % 2 else (True, False):
            taken, counted = timed(call, repeats, on=recorded)
            (on if recorded else off).append(taken)
            events = max(events, counted)
        enough = perf_counter() - began > seconds and len(off) >= 20
        if ring.broadcast(torch.tensor([enough]), 0)[0]:
            return off, on, events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt,conv")
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each row")
    arguments = parser.parse_args()
    ring.init()
    torch.set_num_threads(1)
    tensor = torch.zeros(1)
    calls: dict[str, tuple[Callable[[], object], int]] = {"allreduce_ of 4 B": (lambda: ring.allreduce_(tensor), 200)}
    for name in arguments.models.split(","):
        torch.manual_seed(0)
        model, loss = MODELS[name]()
        calls[f"step of {name}"] = (step_of(model, ring.DistributedOptimizer(OPTIMIZERS["sgd"](model)), loss), 1)
    if ring.rank() == 0:
        print("| | off | on | difference | half of them within | events | counted |\n|---|---|---|---|---|---|---|")
    an_event = 0.0  # seconds that one costs
    for name, (call, repeats) in calls.items():
        timed(call, 3, on=False)
        off, on, events = compare(call, repeats, arguments.seconds)
        an_event = an_event or median(b - a for a, b in zip(off, on, strict=True)) / events
        shares = [b / a - 1 for a, b in zip(off, on, strict=True)]
        low, _, high = quantiles(shares, n=4)
        if ring.rank() == 0:
            print(
                f"| {name} | {median(off) * 1e6:.2f} µs | {median(on) * 1e6:.2f} µs | {median(shares):+.2%} | "
                f"{low:+.1%} to {high:+.1%} | {events:.0f} | {events * an_event / median(off):+.4%} |",
                flush=True,
            )
    ring.shutdown()


if __name__ == "__main__":
    main()
