"""Training over a slow link between two hosts: compressed gradients and local steps, beside DDP and DiLoCo on Gloo.

    sudo .venv/bin/python benchmarks/local_steps.py [--rates 10mbit,100mbit,1gbit,10gbit] [--tasks digits,sources]
    sudo .venv/bin/python benchmarks/local_steps.py --loss  # at equal samples, over one link

Makes two network namespaces joined by a link that tbf limits, with a rank in each. Digits is a small network on the
digits of scikit-learn, wide one of three million parameters, sources a transformer of two layers on the bytes of
Python's own library. "bf16" to "auto" are those of `Compression`, at every step. "Gloo" is DistributedDataParallel, and
its hooks (that for bf16 refuses CPUs), "Gloo DiLoCo" the same algorithm written by hand over torch.distributed,
"torchft" that of torchft on Gloo, where it is installed (``pip install torchft``). Speed: after a warm-up each method
trains for some rounds, and the methods take turns; bytes are those that the first host's interface has sent. Loss: of
samples that no rank has trained on, with the weights of all ranks made equal at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy

import ring_notebook.torch as ring

EVERY, DELAY = 50, 5
BETWEEN = DELAY + 2  # steps behind which nothing is being sent
CONTEXT, WIDTH, HEADS, LAYERS = 64, 128, 4, 2
PORTS = iter(range(29_600, 29_900))
Batch = tuple[Tensor, Tensor]


class Digits:
    """A network with one hidden layer."""

    steps, batch = 1000, 16

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        x, y = torch.tensor(digits.images.reshape(-1, 64) / 16, dtype=torch.float32), torch.tensor(digits.target)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        self.train = x[order[:1400]], y[order[:1400]]
        self.held_out = x[order[1400:]], y[order[1400:]]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def rows(self, generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(self.train[1]), (self.batch,), generator=generator)
        return self.train[0][chosen], self.train[1][chosen]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    def test(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float(self.loss(model, self.held_out))


class Wide(Digits):
    """Three million parameters, of which a step has little to compute: on a GPU most models are like that."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        hidden = [layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), *hidden, nn.Linear(1024, 10))


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 256)
        self.mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.bytes(x) + self.places.weight
        result: Tensor = self.out(self.layers(hidden, mask=self.mask, is_causal=True))
        return result


class Sources(Digits):
    """The transformer on the modules of Python's library; the last twentieth of their bytes is held out."""

    steps, batch = 1000, 8

    def __init__(self) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.end = len(self.text) * 19 // 20

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Transformer()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def rows(self, generator: torch.Generator, first: int = 0, last: int = 0, count: int = 0) -> Batch:
        starts = torch.randint(first, (last or self.end) - CONTEXT - 1, (count or self.batch,), generator=generator)
        whole = torch.stack([self.text[start : start + CONTEXT + 1] for start in starts.tolist()])
        return whole[:, :-1], whole[:, 1:]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def test(self, model: nn.Module) -> float:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            losses = [self.loss(model, self.rows(generator, self.end, len(self.text), 64)) for _ in range(8)]
        return float(torch.stack(losses).mean())


TASKS: dict[str, type[Digits]] = {"digits": Digits, "wide": Wide, "sources": Sources}
Training = tuple[nn.Module, torch.optim.Optimizer, Callable[[], object]]
"""A model, its optimizer, and what makes the weights of all ranks equal at the end."""


def every_step(compression: Any = ring.Compression.none) -> Callable[[Digits], Any]:
    @contextlib.contextmanager
    def made(task: Digits) -> Iterator[Training]:
        model, optimizer = ring.prepare(model := task.model(), task.optimizer(model), compression=compression)
        yield model, optimizer, lambda: None

    return made


def local(settings: ring.LocalSteps, compression: Any = ring.Compression.none) -> Callable[[Digits], Any]:
    @contextlib.contextmanager
    def made(task: Digits) -> Iterator[Training]:
        model = task.model()
        model, optimizer = ring.prepare(model, task.optimizer(model), sync_every=settings, compression=compression)
        yield model, optimizer, optimizer.sync

    return made


def gloo(hook: str = "") -> Callable[[Digits], Any]:
    """With torch's hook "fp16" or "PowerSGD". The latter sends from callbacks, with several buckets in another order on
    each rank, which Gloo cannot match: so it gets one bucket.
    """

    @contextlib.contextmanager
    def made(task: Digits) -> Iterator[Training]:
        inner = task.model()
        model = nn.parallel.DistributedDataParallel(inner, bucket_cap_mb=1000 if hook == "PowerSGD" else None)
        if hook == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif hook == "PowerSGD":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        yield model, task.optimizer(inner), lambda: None

    return made


@contextlib.contextmanager
def gloo_diloco(task: Digits) -> Iterator[Training]:
    """As one writes it by hand: a flat allreduce of the differences, and torch's SGD as the outer optimizer."""
    model = task.model()
    optimizer = task.optimizer(model)
    parameters = list(model.parameters())
    common = [one.detach().clone() for one in parameters]
    outer = torch.optim.SGD(common, lr=0.7, momentum=0.9, nesterov=True)
    steps = 0

    def sync() -> None:
        flat = torch.cat([(c - p.detach()).flatten() for c, p in zip(common, parameters, strict=True)])
        dist.all_reduce(flat)
        parts = torch.split(flat / dist.get_world_size(), [one.numel() for one in common])
        for one, part in zip(common, parts, strict=True):
            one.grad = part.view_as(one)
        outer.step()
        with torch.no_grad():
            for parameter, one in zip(parameters, common, strict=True):
                parameter.copy_(one)

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps % EVERY == 0:
            sync()

    optimizer.register_step_post_hook(count)
    yield model, optimizer, lambda: sync() if steps % EVERY else None


@contextlib.contextmanager
def torchft(task: Digits) -> Iterator[Training]:
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    rank, address = ring.rank(), f"10.77.0.{ring.rank() + 1}"
    port, store_port = next(PORTS), next(PORTS)
    lighthouse = (
        LighthouseServer(bind=f"10.77.0.1:{port}", min_replicas=2, join_timeout_ms=60_000) if rank == 0 else None
    )
    ring.barrier()
    store = dist.TCPStore(address, store_port, is_master=True, wait_for_workers=False)
    model = task.model()
    optimizer = task.optimizer(model)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=60)),
        load_state_dict=lambda _state: None,
        state_dict=dict,
        min_replica_size=2,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store_port,
        lighthouse_addr=f"http://10.77.0.1:{port}",
        replica_id=f"rank{rank}",
        hostname=address,
        init_sync=False,
    )
    try:
        with DiLoCo(manager, [model], optimizer, outer, EVERY, backup_device=torch.device("cpu"), pin_memory=False):
            yield model, optimizer, lambda: None
        ring.barrier()
    finally:
        manager.shutdown(wait=False)
        del store
        if lighthouse is not None:
            lighthouse.shutdown()


def methods() -> dict[str, Callable[[Digits], Any]]:
    outer = {"lr": 0.7, "momentum": 0.9}  # as in the paper
    stream = ring.LocalSteps(EVERY, **outer, fragments=5, delay=DELAY)
    found = {
        "every step": every_step(),
        "bf16": every_step(ring.Compression.bf16),
        "int8": every_step(ring.Compression.int8),
        "PowerSGD": every_step(ring.Compression.powersgd(4)),
        "auto": every_step(ring.Compression.auto),
        "Gloo": gloo(),
        "Gloo fp16": gloo("fp16"),
        "Gloo PowerSGD": gloo("PowerSGD"),
        "local SGD": local(ring.LocalSteps(EVERY, lr=1, momentum=0)),
        "local SGD int8": local(ring.LocalSteps(EVERY, lr=1, momentum=0), ring.Compression.int8),
        "DiLoCo": local(ring.LocalSteps(EVERY, **outer)),
        "DiLoCo 0.5": local(ring.LocalSteps(EVERY)),
        "streaming": local(stream),
        "streaming int8": local(stream, ring.Compression.int8),
        "Gloo DiLoCo": gloo_diloco,
    }
    with contextlib.suppress(ImportError):
        import torchft as _  # noqa: F401

        found["torchft"] = torchft
    return found


def sent() -> int:
    """Bytes that this host has sent over the link."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("link0:"))


def train(task: Digits, training: Training, generator: torch.Generator, steps: int) -> None:
    model, optimizer, _ = training
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss(model, task.rows(generator)).backward()
        optimizer.step()


def is_every_step(name: str) -> bool:
    return name in ("every step", "bf16", "int8", "PowerSGD", "auto", "Gloo", "Gloo fp16", "Gloo PowerSGD")


def speed(task: Digits, wanted: dict[str, Callable[[Digits], Any]], turns: int, most: int) -> dict[str, Any]:
    """Steps a second and bytes a step of each method: whole rounds, or ``most`` steps that send each time."""
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as opened:
        trainings = {name: opened.enter_context(made(task)) for name, made in wanted.items()}
        generators = {name: torch.Generator().manual_seed(ring.rank()) for name in wanted}
        counts = {name: most if is_every_step(name) else EVERY for name in wanted}
        for name, training in trainings.items():  # a whole round, and to where no fragment is under way
            train(task, training, generators[name], 5 if is_every_step(name) else EVERY + BETWEEN)
        taken: dict[str, list[tuple[float, int]]] = {name: [] for name in wanted}
        for _ in range(turns):
            for name, training in trainings.items():
                ring.barrier()
                before, began = sent(), perf_counter()
                train(task, training, generators[name], counts[name])
                ring.barrier()
                taken[name].append((perf_counter() - began, sent() - before))
        for name, pairs in taken.items():
            found[name] = {
                "steps/s": counts[name] / median(seconds for seconds, _ in pairs),
                "bytes": median(nbytes for _, nbytes in pairs) / counts[name],
            }
    return found


def loss(task: Digits, wanted: dict[str, Callable[[Digits], Any]], seeds: int, steps: int) -> dict[str, Any]:
    """The loss of each method after as many samples, the mean over orders of the samples."""
    found: dict[str, Any] = {}
    for name, made in wanted.items():
        losses = []
        for seed in range(seeds):
            with made(task) as training:
                generator = torch.Generator().manual_seed(1000 * seed + ring.rank())
                train(task, training, generator, steps or task.steps)
                training[2]()
                losses.append(task.test(training[0]))
        found[name] = {"loss": sum(losses) / len(losses), "losses": losses}
        if ring.rank() == 0:
            print(f"# {name}: {losses}", file=sys.stderr, flush=True)
    return found


def rank_main(arguments: argparse.Namespace) -> None:
    ring.init()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://10.77.0.1:{next(PORTS)}", rank=ring.rank(), world_size=2)
    chosen = {
        name: made for name, made in methods().items() if not arguments.methods or name in arguments.methods.split(",")
    }
    for name in arguments.tasks.split(","):
        task = TASKS[name]()
        if arguments.loss:
            results = loss(task, chosen, arguments.seeds, arguments.steps)
        else:
            results = speed(task, chosen, arguments.turns, arguments.most)
        if ring.rank() == 0:
            print("RESULT " + json.dumps({name: results}), flush=True)
    dist.destroy_process_group()
    ring.shutdown()


def show(name: str, rate: str, results: dict[str, Any]) -> None:
    """Rows of the table in the README."""
    base = results.get("every step", {})
    for method, numbers in results.items():
        if "loss" in numbers:
            less = f"{numbers['loss'] / base['loss'] - 1:+.1%}" if base else ""
            print(f"| {name} | {method} | {numbers['loss']:.4f} | {less} |", flush=True)
        else:
            faster = f"{numbers['steps/s'] / base['steps/s']:.2f}x" if base else ""
            size = f"{numbers['bytes'] / 1e3:.1f} kB"
            print(f"| {name} | {rate} | {method} | {numbers['steps/s']:.2f} | {faster} | {size} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="10mbit,100mbit,1gbit,10gbit", help="of the link, as tc writes them")
    parser.add_argument("--tasks", default="digits,sources")
    parser.add_argument("--methods", default="", help="names of rows, separated by commas; all without it")
    parser.add_argument("--loss", action="store_true", help="compare losses instead of speed, at the last of the rates")
    parser.add_argument("--seeds", type=int, default=3, help="orders of the samples, with --loss")
    parser.add_argument("--steps", type=int, default=0, help="with --loss; by default those of each task")
    parser.add_argument("--turns", type=int, default=3, help="turns of each method")
    parser.add_argument("--most", type=int, default=10, help="steps of a turn of methods that send at every step")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(arguments)
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from harness.two_hosts import NAMES, missing, two_hosts

    if reason := missing():
        sys.exit(f"two hosts cannot be made here: {reason}")
    rates = arguments.rates.split(",")
    heads = "| task | method | loss | to every step |\n|---|---|---|---|"
    if not arguments.loss:
        heads = (
            "| task | link | method | steps/s | to every step | sent by a host in a step |\n|---|---|---|---|---|---|"
        )
    print(f"load {os.getloadavg()[0]:.1f}\n\n{heads}", flush=True)
    for rate in rates[-1:] if arguments.loss else rates:
        with two_hosts(rate) as hosts:
            ringrun = [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix", "-np", "2"]
            where = ["-H", ",".join(f"{name}:1" for name in NAMES)]
            program = [sys.executable, str(Path(__file__).resolve()), "--rank", *sys.argv[1:]]
            environment = {"GLOO_SOCKET_IFNAME": "link0", "RING_TRANSPORT": "tcp"}
            output = hosts.on_first([*ringrun, *where, *program], timeout=3000, environment=environment)
        for line in output.splitlines():
            if line.startswith("RESULT "):
                for name, results in json.loads(line.removeprefix("RESULT ")).items():
                    show(name, rate, results)
    print(f"\nload {os.getloadavg()[0]:.1f}", file=sys.stderr)


if __name__ == "__main__":
    main()
