"""Seconds without a step while a checkpoint is written: ours at once, ours in the background, and torch's async_save.

    ringrun -np 2 python benchmarks/checkpoints.py
    ringrun -np 2 python benchmarks/checkpoints.py --width 1024 --rounds 9 --folder /mnt/disk

Each way saves the same model and optimizer (Adam) once a round, in turn. "Behind" is the time by which the step that
saves is longer than the median of steps that do not; "in all" sums this over all steps until the checkpoint is whole,
so that it has what writing takes from the cores of the steps. The slowest rank counts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import async_save

import ring_notebook.torch as ring
from ring_notebook.core.run_options import ask_for_checkpoint

Way = tuple[Callable[[], None], Callable[[], bool]]
"""What a step does at its end to save, and whether this rank has nothing left to write."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1536, help="of four layers; three times their weights are kept")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="on the disk to write to; by default among temporary files")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    ring.init()
    ring.process_group("gloo")
    made = tempfile.mkdtemp(dir=options.folder) if ring.rank() == 0 else None
    folder = Path(ring.broadcast_object(made))
    layers = [nn.Linear(options.width, options.width) for _ in range(4)]
    model = nn.Sequential(*layers)
    model, optimizer = ring.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-4))
    inputs = torch.randn(16, options.width)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    try:
        ways = {
            "`ring.checkpoint`": ours(model, optimizer, folder / "once", background=False),
            "`ring.checkpoint(background=True)`": ours(model, optimizer, folder / "background", background=True),
            "`torch.distributed.checkpoint.async_save`": torchs(model, optimizer, folder / "torch"),
        }
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
        for number in range(options.rounds + 1):
            for name, way in ways.items():
                times = measured(step, *way)
                if number:  # the first one makes plans and memory
                    found[name].append(times)
    finally:
        ring.barrier()
        if ring.rank() == 0:
            shutil.rmtree(folder)
    if ring.rank() == 0:
        state = sum(parameter.numel() for parameter in model.parameters()) * 12 / 1e6
        print(f"{state:.0f} MB, {ring.size()} ranks, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}\n")
        print("| | behind, s | in all, s | until it is whole, s |\n|---|---|---|---|")
        for name, rows in found.items():
            print(f"| {name} | " + " | ".join(f"{median(column):.3f}" for column in zip(*rows, strict=True)) + " |")


def measured(step: Callable[[], None], save: Callable[[], None], is_whole: Callable[[], bool]) -> tuple[float, ...]:
    """Seconds: behind, in all, and until the checkpoint is whole."""

    def timed(saves: bool = False) -> float:
        begin = perf_counter()
        step()
        if saves:
            save()
        return perf_counter() - begin

    usual = median([timed() for _ in range(12)][2:])
    ring.barrier()
    begin = perf_counter()
    times = [timed(saves=True)]
    while not all(ring.allgather_object(is_whole())):
        times.append(timed())
    whole = perf_counter() - begin
    own = times[0] - usual, sum(one - usual for one in times), whole
    return tuple(max(column) for column in zip(*ring.allgather_object(own), strict=True))


def ours(model: Any, optimizer: Any, folder: Path, background: bool) -> Way:
    saved = ring.checkpoint(model, optimizer, folder=folder, every="100h", keep=1, background=background)

    def save() -> None:
        ask_for_checkpoint()
        saved.step()

    return save, lambda: not saved.is_writing()


def torchs(model: Any, optimizer: Any, folder: Path) -> Way:
    """As its tutorial has it, with the one before removed."""
    group, begun, count = dist.new_group(backend="gloo"), list[Any](), [0]

    def save() -> None:
        count[0] += 1
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        begun[:] = [async_save(state, checkpoint_id=folder / str(count[0]), process_group=group)]

    def is_whole() -> bool:
        if not begun or not begun[0].done():
            return False
        begun[0].result()
        if ring.rank() == 0:
            shutil.rmtree(folder / str(count[0] - 1), ignore_errors=True)
        return True

    return save, is_whole


if __name__ == "__main__":
    main()
