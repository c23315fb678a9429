"""The time of a training step: ours, DDP, Horovod (where installed) and ranks that do not communicate.

    ringrun -np 2 python benchmarks/training.py [--models fc,conv,gpt] [--optimizer sgd|adam] [--seconds 20]
    [--variants alone,ours] [--logical 8]

All variants train in one run and take turns step by step, one thread per rank, so that they see the same noise. The
figure is the median of a step's time on the slowest rank; in parentheses what it costs beyond ranks that train alone.
With ``--logical`` a step has the batches of so many logical ranks: with ``prepare(logical=...)``, with as many batches
accumulated, on ranks that train alone, and with the marks of gradients that a notebook's record has ("marked").
With RING_ALLOCATOR=system malloc keeps no freed memory on any of them. Under the table stand the page faults of a step
on rank 0, and the most memory that a rank took.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from peers import start_gloo
from torch import Tensor, nn

import ring_notebook.torch as ring
from ring_notebook.core.gradient_log import gradient_log

Loss = Callable[[nn.Module], Tensor]


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.between(x))
        return out


def fc() -> tuple[nn.Module, Loss]:
    """21 million parameters in three large layers: the most to communicate for the least to compute."""
    model = nn.Sequential(nn.Linear(1024, 3072), nn.ReLU(), nn.Linear(3072, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    x, y = torch.randn(64, 1024), torch.randn(64, 1024)
    return model, lambda net: nn.functional.mse_loss(net(x), y)


def conv() -> tuple[nn.Module, Loss]:
    """0.1 million parameters in convolutions: much to compute, little to communicate."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    x, y = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    return model, lambda net: nn.functional.cross_entropy(net(x), y)


def gpt() -> tuple[nn.Module, Loss]:
    """4.9 million parameters: a small transformer."""
    width = 256
    model = nn.Sequential(nn.Embedding(256, width), *[Block(width) for _ in range(6)], nn.Linear(width, 256))
    x, y = torch.randint(256, (4, 64)), torch.randint(256, (4 * 64,))
    return model, lambda net: nn.functional.cross_entropy(net(x).flatten(0, 1), y)


MODELS = {"fc": fc, "conv": conv, "gpt": gpt}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-4),
}


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> Callable[[], None]:
    """One training step."""

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step


def variants(name: str, optimizer: str, wanted: list[str]) -> dict[str, Callable[[], None]]:
    """The steps to compare, each over a model of its own that begins alike; those ``wanted``, or all."""
    make = OPTIMIZERS[optimizer]

    def build() -> tuple[nn.Module, Loss]:
        torch.manual_seed(0)
        return MODELS[name]()

    steps: dict[str, Callable[[], None]] = {}
    model, loss = build()
    steps["alone"] = step_of(model, make(model), loss)
    if not wanted or "ours" in wanted:
        model, loss = build()
        steps["ours"] = step_of(model, ring.DistributedOptimizer(make(model)), loss)
    if not wanted or "DDP" in wanted:
        start_gloo()
        model, loss = build()
        parallel = nn.parallel.DistributedDataParallel(model)
        steps["DDP"] = step_of(parallel, make(parallel), loss)
    if importlib.util.find_spec("horovod") is not None and (not wanted or "Horovod" in wanted):
        import horovod.torch as hvd

        hvd.init()
        model, loss = build()
        steps["Horovod"] = step_of(model, hvd.DistributedOptimizer(make(model), model.named_parameters()), loss)
    return steps


def in_turns(name: str, optimizer: str, logical: int) -> dict[str, Callable[[], None]]:
    """The steps of ``logical`` logical ranks to compare, each over a model of its own that begins alike."""
    make, turns = OPTIMIZERS[optimizer], logical // ring.size()

    def batches(wrap: Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]) -> Callable[[], None]:
        torch.manual_seed(0)
        model, loss = MODELS[name]()
        return step_of(*wrap(model), loss)

    def alone() -> None:
        one.zero_grad()
        for _ in range(turns):
            (loss(model) / turns).backward()
        one.step()

    def accumulated() -> None:
        for _ in range(turns):
            accumulates()

    def ordered() -> None:
        for _ in ring.logical_turns(range(1)):
            takes_turns()

    def marked() -> None:
        gradient_log.begin("", ring.rank(), b"", -1, bool)
        ordered()
        gradient_log.drain()
        gradient_log.end()

    torch.manual_seed(0)
    model, loss = MODELS[name]()
    one = make(model)
    accumulates = batches(lambda other: ring.prepare(other, make(other), accumulate=turns))
    takes_turns = batches(lambda other: ring.prepare(other, make(other), logical=logical))
    return {"alone": alone, "accumulate": accumulated, "logical": ordered, "marked": marked}


def page_faults() -> int:
    """Pages that this process has had to wait for so far, of memory that was new to it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def measure(steps: dict[str, Callable[[], None]], seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    """Median time of each step in seconds, of the slowest rank, interleaved; and its page faults on this rank."""
    for _ in range(3):
        for step in steps.values():
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    faults: dict[str, list[int]] = {name: [] for name in steps}
    began = perf_counter()
    while True:
        for name, step in steps.items():
            ring.barrier()
            before, start = page_faults(), perf_counter()
            step()
            faults[name].append(page_faults() - before)
            ring.barrier()  # a step is over when it is over on all ranks, also for ranks that train alone
            times[name].append(perf_counter() - start)
        enough = perf_counter() - began > seconds and len(times["alone"]) >= 10
        if ring.broadcast(torch.tensor([enough]), 0)[0]:
            return (
                {name: median(values) for name, values in times.items()},
                {name: median(values) for name, values in faults.items()},
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="fc,conv,gpt")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for each model")
    parser.add_argument("--variants", default="", help="only these, beside alone")
    parser.add_argument("--logical", type=int, default=0, help="compare steps of so many logical ranks")
    arguments = parser.parse_args()
    wanted = [name for name in arguments.variants.split(",") if name]
    ring.init()
    torch.set_num_threads(1)
    summary: list[str] = []
    for number, name in enumerate(arguments.models.split(",")):
        if arguments.logical:
            steps = in_turns(name, arguments.optimizer, arguments.logical)
        else:
            steps = variants(name, arguments.optimizer, wanted)
        result, faults = measure(steps, arguments.seconds)
        if ring.rank() == 0:
            if number == 0:
                print(f"{ring.size()} ranks, one thread each, {arguments.optimizer}\n")
                print("| model | " + " | ".join(result) + " |")
                print("|---" * (len(result) + 1) + "|")
            alone = result["alone"]
            cells = [f"{t * 1e3:.1f} ms" + (f" ({t / alone - 1:+.0%})" if t != alone else "") for t in result.values()]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
            summary.append(f"page faults a step of {name}: " + ", ".join(f"{k} {v:.0f}" for k, v in faults.items()))
    peak = ring.allreduce(torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]), op=ring.Max)
    if ring.rank() == 0:
        print("", *summary, sep="\n")
        print(f"at most {int(peak) / 1024:.0f} MiB a rank")
    ring.shutdown()


if __name__ == "__main__":
    main()
