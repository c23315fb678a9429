"""What knobs cost a step: the end of an empty step while nothing changes, after changes, and with one at every step.

    ringrun -np 2 python benchmarks/steering.py [--seconds 10]
    ringrun -np 1 python benchmarks/steering.py

``without`` is a step whose ranks take no part in changes: they commit, and hold interrupts. All others do what a step
of a prepared optimizer does between its reduction and its update. One rank waits for nobody, which shows what the code
costs on a busy machine too. Turns are interleaved; medians, and the interval in
which half of the differences to the neighbouring turn of ``without`` lie.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import count
from statistics import median, quantiles
from time import perf_counter, thread_time

import torch

import ring_notebook.torch as ring
from ring_notebook.core import world
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.steering import steering
from ring_notebook.core.step_guard import COMMIT, StepGuard, step_guard
from ring_notebook.protocol.records import SET

REPEATS = 200


class Bare(StepGuard):
    """A guard as it would be if there were no knobs."""

    def _commit(self, communicator: Communicator) -> BaseException | None:
        self._stand_before()
        self.held, self._steps_at = False, None
        return communicator.commit(self, name=COMMIT)


bare = Bare()


def without() -> None:
    """A step that takes no part in changes."""
    with bare.committed(world.current().communicator):
        pass


def step() -> None:
    """A step as of a prepared optimizer; `ring.step` of one rank would commit with nobody."""
    with step_guard.committed(world.current().communicator):
        pass


def changed() -> None:
    """A step that takes a change which all ranks have received."""
    number = steering.newest + 1
    steering.receive([{"number": number, "action": SET, "values": {"rate": 1.0 / number}, "who": "benchmark"}])
    step()
    steering.drain()


def timed(call: Callable[[], object]) -> float:
    """Seconds per call, all ranks beginning together; of one rank those of its processor."""
    clock = perf_counter if ring.size() > 1 else thread_time
    ring.barrier()
    start = clock()
    for _ in range(REPEATS):
        call()
    return (clock() - start) / REPEATS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each row")
    arguments = parser.parse_args()
    ring.init()
    steering.begin("benchmark", ring.rank())
    rate = ring.knob("rate", 0.5)
    if ring.rank() == 0:
        print("| | without | with | difference | half of them within |\n|---|---|---|---|---|")
    rows = {"nothing changes": step, "changes before": step, "a change at every step": changed}
    for turn, (name, call) in enumerate(rows.items()):
        if turn == 1:
            changed()
        pairs: list[tuple[float, float]] = []
        began = perf_counter()
        for number in count():
            first, second = (without, call) if number % 2 else (call, without)
            taken = {first: timed(first), second: timed(second)}
            pairs.append((taken[without], taken[call]))
            enough = perf_counter() - began > arguments.seconds and number >= 20
            if ring.broadcast(torch.tensor([enough]), 0)[0]:
                break
        differences = [b - a for a, b in pairs]
        low, _, high = quantiles(differences, n=4)
        if ring.rank() == 0:
            print(
                f"| {name} | {median(a for a, _ in pairs) * 1e6:.2f} µs | {median(b for _, b in pairs) * 1e6:.2f} µs | "
                f"{median(differences) * 1e6:+.2f} µs | {low * 1e6:+.2f} to {high * 1e6:+.2f} |",
                flush=True,
            )
    assert float(rate) < 0.5


if __name__ == "__main__":
    main()
