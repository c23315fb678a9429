"""What RING_FUSION_THRESHOLD does to a training step: from a reduction for each gradient to one for all of them.

    ringrun -np P python benchmarks/fusion.py [--models gpt,fc] [--seconds 10]

The same model trains under each threshold, and alone; all take turns step by step. In parentheses what a step costs
beyond ranks that do not communicate.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
from allreduce import human
from training import MODELS, OPTIMIZERS, measure, step_of

import ring_notebook.torch as ring
from ring_notebook.config import config

THRESHOLDS = [0, 64 << 10, 1 << 20, 8 << 20, 64 << 20]


def steps_by_threshold(name: str) -> dict[str, Callable[[], None]]:
    """A step under each threshold, the first one of each done: it is what settles the buckets."""
    steps: dict[str, Callable[[], None]] = {}
    for threshold in (None, *THRESHOLDS):
        torch.manual_seed(0)
        model, loss = MODELS[name]()
        optimizer = OPTIMIZERS["sgd"](model)
        if threshold is None:
            steps["alone"] = step_of(model, optimizer, loss)
            continue
        os.environ["RING_FUSION_THRESHOLD"] = str(threshold)
        config.cache_clear()
        label = human(threshold)
        steps[label] = step_of(model, ring.DistributedOptimizer(optimizer), loss)
        steps[label]()
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt,fc")
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each model")
    arguments = parser.parse_args()
    ring.init()
    torch.set_num_threads(1)
    for number, name in enumerate(arguments.models.split(",")):
        steps = steps_by_threshold(name)
        result = measure(steps, arguments.seconds)
        if ring.rank() == 0:
            if number == 0:
                print("| model | gradients | " + " | ".join(result) + " |")
                print("|---" * (len(result) + 2) + "|")
            alone = result["alone"]
            cells = [f"{t * 1e3:.1f} ms" + (f" ({t / alone - 1:+.1%})" if t != alone else "") for t in result.values()]
            gradients = sum(1 for _ in MODELS[name]()[0].parameters())
            print(f"| {name} | {gradients} | " + " | ".join(cells) + " |", flush=True)
    ring.shutdown()


if __name__ == "__main__":
    main()
