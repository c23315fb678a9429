"""The same small training under ringrun, torchrun, Ray, Dask, Spark and as pods: its start, its steps, its recovery.

    make .engines/installed
    sudo PYTHONPATH=$(echo .engines/venv/lib/*/site-packages) \\
        .venv/bin/python benchmarks/recovery.py [--systems ringrun,torchrun] [--runs 3]
    sudo PYTHONPATH=$(echo .engines/venv/lib/*/site-packages) \\
        .venv/bin/python benchmarks/recovery.py --start

Two network namespaces with two ranks each train a small network on the digits of scikit-learn. Each step has a batch of
its own, which the ranks share, so the loss at the end is that of one process whatever happened meanwhile. It is
compared.

Without ``--start`` rank 3 kills itself by SIGKILL in the middle. The time is that from there to the end of the next
step, which other ranks have made together: in place from the last commit, or started again from the last checkpoint,
both of which are written every 10 steps. torchrun restarts the workers of all its agents (``--max-restarts``), Ray
Train those of its worker group (``FailureConfig``), as their documents recommend for training that survives failures.

With ``--start``: from the command, or the call where an engine runs already, to the end of the first step; and steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve()
sys.path = [folder for folder in sys.path if Path(folder).resolve() != HERE.parent]  # distributed.py is no Dask there
BATCH = 48  # rows of a step; two, three and four ranks have equal shares
EVERY = 10  # steps between commits, or checkpoints
VICTIM = 3
LIMIT = 240.0  # seconds until a system counts as stuck
SECRET = "0123456789abcdef" * 4  # of a network that exists for this benchmark
HEAD = "10.77.0.1"


class Plan(NamedTuple):
    """What the ranks are to do, and where they say how it goes."""

    folder: str
    steps: int
    dies_at: int
    """The step before which the victim kills itself, once; 0 for never."""


class Notes:
    """What this process tells the benchmark: a line for each step."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._file = os.open(f"{plan.folder}/rank-{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def before(self, step: int, rank: int) -> None:
        """The victim's end."""
        if 0 < step == self._plan.dies_at and rank == VICTIM:
            with contextlib.suppress(FileExistsError):
                killed = os.open(f"{self._plan.folder}/killed", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                os.write(killed, str(time.monotonic()).encode())
                os.kill(os.getpid(), signal.SIGKILL)

    def after(self, step: int, size: int) -> None:
        """A step has been made."""
        os.write(self._file, f"{step} {size} {time.monotonic()}\n".encode())

    def end(self, loss: float) -> None:
        """The training has ended."""
        Path(self._plan.folder, f"loss-{os.getpid()}").write_text(str(loss))


class Digits:
    """A network with one hidden layer, and the batch of each step."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        torch.set_num_threads(1)
        digits = load_digits()
        self.x = torch.tensor(digits.images.reshape(-1, 64) / 16, dtype=torch.float32)
        self.y = torch.tensor(digits.target)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def loss(self, model: nn.Module, step: int, rank: int, size: int) -> Tensor:
        """That of the rank's share of a step."""
        rows = torch.randint(len(self.y), (BATCH,), generator=torch.Generator().manual_seed(step))[rank::size]
        return nn.functional.cross_entropy(model(self.x[rows]), self.y[rows])

    def whole(self) -> float:
        """That of all samples."""
        with torch.no_grad():
            return float(nn.functional.cross_entropy(self.model(self.x), self.y))


def ours(*given: Any) -> None:
    """The training by Ring Notebook."""
    import ring_notebook.torch as hvd

    plan = Plan(*given)
    hvd.init()
    task, notes = Digits(), Notes(plan)
    optimizer = hvd.DistributedOptimizer(task.optimizer, named_parameters=task.model.named_parameters())

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < plan.steps:
            notes.before(state.step, int(os.environ["RING_RANK"]) if "RING_RANK" in os.environ else hvd.rank())
            optimizer.zero_grad()
            task.loss(task.model, state.step, hvd.rank(), hvd.size()).backward()
            optimizer.step()
            state.step += 1
            notes.after(state.step, hvd.size())
            if state.step % EVERY == 0:
                state.commit()

    train(hvd.elastic.TorchState(task.model, optimizer, step=0))
    notes.end(task.whole())


def by_ddp(plan: Plan, task: Digits, model: nn.Module, rank: int, size: int, begin: int) -> Iterator[int]:
    """The training by DistributedDataParallel; the steps behind which there is to be a checkpoint."""
    notes = Notes(plan)
    for step in range(begin, plan.steps):
        notes.before(step, rank)
        task.optimizer.zero_grad()
        task.loss(model, step, rank, size).backward()
        task.optimizer.step()
        notes.after(step + 1, size)
        if (step + 1) % EVERY == 0:
            yield step + 1
    notes.end(task.whole())


def save(task: Digits, step: int, path: str) -> None:
    torch.save({"model": task.model.state_dict(), "optimizer": task.optimizer.state_dict(), "step": step}, path)


def load(task: Digits, path: str) -> int:
    kept = torch.load(path)
    task.model.load_state_dict(kept["model"])
    task.optimizer.load_state_dict(kept["optimizer"])
    return int(kept["step"])


def ddp(*given: Any) -> None:
    """What torchrun starts: Gloo, and a checkpoint in a file."""
    import torch.distributed as dist

    plan = Plan(*given)
    dist.init_process_group("gloo")
    rank, size, task, kept = dist.get_rank(), dist.get_world_size(), Digits(), f"{plan.folder}/checkpoint"
    begin = load(task, kept) if os.path.exists(kept) else 0
    model = nn.parallel.DistributedDataParallel(task.model)
    for step in by_ddp(plan, task, model, rank, size, begin):
        if rank == 0:
            save(task, step, f"{kept}.new")
            os.replace(f"{kept}.new", kept)
    dist.destroy_process_group()


def in_ray_train(given: list[Any]) -> None:
    """What Ray Train starts."""
    import ray.train
    from ray.train.torch import prepare_model

    plan, task, context, begin = Plan(*given), Digits(), ray.train.get_context(), 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            begin = load(task, f"{folder}/kept")
    model = prepare_model(task.model)
    for step in by_ddp(plan, task, model, context.get_world_rank(), context.get_world_size(), begin):
        with tempfile.TemporaryDirectory() as folder:
            kept = None
            if context.get_world_rank() == 0:
                save(task, step, f"{folder}/kept")
                kept = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"step": step}, checkpoint=kept)


# What drives the ranks of an engine; it runs on the first host.


def began(plan: Plan) -> None:
    Path(plan.folder, "began").write_text(str(time.monotonic()))


def connect_ray() -> None:
    import ray

    ray.init(address=f"{HEAD}:6379", log_to_driver=False)
    deadline = time.monotonic() + LIMIT
    while ray.cluster_resources().get("CPU", 0) < 4:
        assert time.monotonic() < deadline, f"the hosts of Ray do not meet: {ray.cluster_resources()}"
        time.sleep(0.5)


def drive_ray(plan: Plan) -> None:
    from ring_notebook import ray

    connect_ray()
    began(plan)
    ray.run(ours, plan, num_proc=4, gpus_per_worker=0, min_np=3 if plan.dies_at else None)


def drive_ray_train(plan: Plan) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    connect_ray()
    began(plan)
    TorchTrainer(
        in_ray_train,
        train_loop_config=list(plan),
        torch_config=TorchConfig("gloo"),
        scaling_config=ScalingConfig(num_workers=4, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=plan.folder, name="train", failure_config=FailureConfig(max_failures=1)),
    ).fit()


def drive_dask(plan: Plan) -> None:
    from distributed import Client

    from ring_notebook import dask

    with Client(f"tcp://{HEAD}:8786") as client:
        client.wait_for_workers(4)
        began(plan)
        dask.run(client, ours, plan)


def drive_spark(plan: Plan) -> None:
    from pyspark.sql import SparkSession

    from ring_notebook import spark

    builder = SparkSession.builder.master(f"spark://{HEAD}:7077").config("spark.ui.enabled", "false")
    here = builder.config("spark.driver.host", HEAD).config("spark.driver.bindAddress", HEAD)
    session = here.config("spark.cores.max", "4").config("spark.executor.memory", "512m").getOrCreate()
    session.sparkContext.parallelize(range(4), 4).sum()  # until its executors run
    began(plan)
    spark.run(ours, plan, num_proc=4)
    session.stop()


# What runs where.

Hosts = Any  # harness.two_hosts.TwoHosts, which only the benchmark itself can import
Commands = list[tuple[int, list[str], dict[str, str]]]
"""On which host, what, and with which variables beside those of the benchmark."""


def program(how: str, plan: Plan) -> list[str]:
    return [str(HERE), "--call", how, *map(str, plan)]


def python(how: str, plan: Plan) -> list[str]:
    return [sys.executable, *program(how, plan)]


def ringrun(*options: str) -> Callable[[Plan], Commands]:
    def commands(plan: Plan) -> Commands:
        start = [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix", "-np", "4", "-H", "ring-a:2,ring-b:2"]
        return [(0, [*start, *options, *python("ours", plan)], {})]

    return commands


def torchrun(how: str, hosts: int = 2) -> Callable[[Plan], Commands]:
    def commands(plan: Plan) -> Commands:
        start = ["-m", "torch.distributed.run", f"--nnodes={hosts}", f"--nproc-per-node={4 // hosts}"]
        start += ["--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint={HEAD}:29500", "--rdzv-id=digits"]
        more = {"RING_RENDEZVOUS": f"{HEAD}:29600", "RING_RENDEZVOUS_SECRET": SECRET} if how == "ours" else {}
        # Else workers that are started again read addresses of those before them (PyTorch's issue 135712).
        more |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "link0", "OMP_NUM_THREADS": "1"}
        return [(host, [sys.executable, *start, *program(how, plan)], more) for host in range(hosts)]

    return commands


def pods(plan: Plan) -> Commands:
    """The command and the variables of docs/kubernetes/indexed-job.yaml."""
    given = {"RING_RENDEZVOUS": f"{HEAD}:29600", "RING_RENDEZVOUS_SECRET": SECRET, "RING_SIZE": "4"}
    return [(rank // 2, python("ours", plan), {**given, "RING_RANK": str(rank)}) for rank in range(4)]


def driven(how: str) -> Callable[[Plan], Commands]:
    return lambda plan: [(0, python(how, plan), {"GLOO_SOCKET_IFNAME": "link0"})]


RAY = ["-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2", "--object-store-memory=100000000"]
DASK = ["-m", "distributed.cli.dask_worker", f"tcp://{HEAD}:8786", "--nworkers=2", "--nthreads=1", "--no-dashboard"]
ENGINES: dict[str, list[tuple[int, list[str]]]] = {
    "": [],
    "ray": [
        (0, [*RAY, "--head", f"--node-ip-address={HEAD}", "--port=6379", "--include-dashboard=false"]),
        (1, [*RAY, f"--address={HEAD}:6379", "--node-ip-address=10.77.0.2"]),
    ],
    "dask": [
        (0, ["-m", "distributed.cli.dask_scheduler", "--host", HEAD, "--port", "8786", "--no-dashboard"]),
        (0, DASK),
        (1, DASK),
    ],
    "spark": [
        (0, ["org.apache.spark.deploy.master.Master", "--host", HEAD, "--port", "7077"]),
        (0, ["org.apache.spark.deploy.worker.Worker", "-c", "2", "-m", "1g", "--host", HEAD, f"spark://{HEAD}:7077"]),
        (1, ["org.apache.spark.deploy.worker.Worker", "-c", "2", "-m", "1g", "--host", "10.77.0.2", f"spark://{HEAD}:7077"]),
    ],
}  # fmt: skip


class System(NamedTuple):
    """One row."""

    engine: str
    commands: Callable[[Plan], Commands]


START = {
    "ringrun": System("", ringrun()),
    "torchrun": System("", torchrun("ours")),
    "torchrun, DDP on Gloo": System("", torchrun("ddp")),
    "Ray": System("ray", driven("drive_ray")),
    "Ray Train, DDP on Gloo": System("ray", driven("drive_ray_train")),
    "Dask": System("dask", driven("drive_dask")),
    "Spark": System("spark", driven("drive_spark")),
    "pods": System("", pods),
}
KILL = {
    "ringrun --elastic": System("", ringrun("--elastic")),
    "ringrun --min-np 4 --max-np 4": System("", ringrun("--min-np", "4", "--max-np", "4")),
    "torchrun, one host": System("", torchrun("ddp", 1)),
    "torchrun, two hosts": System("", torchrun("ddp")),
    "Ray, min_np=3": System("ray", driven("drive_ray")),
    "Ray Train, max_failures=1": System("ray", driven("drive_ray_train")),
}


def begin(hosts: Hosts, host: int, command: list[str], more: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            [str(hosts.folder / "launcher"), hosts.names[host], f"exec {shlex.join(command)}"],
            env={**os.environ, **hosts.environment, **more},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)


@contextlib.contextmanager
def engine(hosts: Hosts, name: str) -> Iterator[None]:
    """Both hosts of an engine, while it is needed."""
    started: list[subprocess.Popen[bytes]] = []
    log = hosts.folder / f"{name}.log"
    log.touch()
    # On a busy machine Ray needs longer than the 30 s that it gives itself.
    os.environ |= {"RAY_TMPDIR": f"{hosts.folder}/ray", "RAY_raylet_start_wait_time_s": "200"}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "PYSPARK_PYTHON": sys.executable}
    try:
        for host, command in ENGINES[name]:
            start = [sys.executable]
            if name == "spark":
                import pyspark

                start = [str(Path(pyspark.__file__).parent / "bin" / "spark-class")]
            started.append(begin(hosts, host, [*start, *command], {}, log))
            deadline = time.monotonic() + LIMIT  # workers of the others wait for their head themselves
            while name == "ray" and "Ray runtime started" not in log.read_text() and time.monotonic() < deadline:
                time.sleep(0.1)
        yield
    except Exception:
        print(log.read_text(errors="replace")[-6000:], file=sys.stderr)
        raise
    finally:
        end(started)


class Result(NamedTuple):
    """What a run has shown."""

    start: float
    step: float
    recovery: float
    again: int
    """Steps that were made twice."""
    loss: float


def run(hosts: Hosts, system: System, steps: int, dies_at: int) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(folder, steps, dies_at)
        log = Path(folder, "log")
        beginning = time.monotonic()
        processes = [begin(hosts, *command, log) for command in system.commands(plan)]
        try:
            codes = [process.wait(LIMIT) for process in processes]
            assert not any(codes), f"exit codes {codes}"
            return result(Path(folder), beginning, dies_at)
        except (AssertionError, subprocess.TimeoutExpired):
            print(log.read_text(errors="replace")[-60000:], file=sys.stderr)
            raise
        finally:
            end(processes)


def result(folder: Path, beginning: float, dies_at: int) -> Result:
    with contextlib.suppress(FileNotFoundError):
        beginning = float((folder / "began").read_text())
    lines: dict[str, list[tuple[int, int, float]]] = {}
    for file in folder.glob("rank-*"):
        found = [line.split() for line in file.read_text().splitlines()]
        lines[file.name] = [(int(step), int(size), float(at)) for step, size, at in found]
    losses = {float(file.read_text()) for file in folder.glob("loss-*")}
    assert losses
    assert max(losses) - min(losses) < 1e-4, f"losses {losses}"
    first = min(at for notes in lines.values() for _, _, at in notes)
    longest = max(lines.values(), key=len)
    step = median(after[2] - before[2] for before, after in pairwise(longest) if after[0] == before[0] + 1)
    recovery, again = 0.0, 0
    if dies_at:
        killed = float((folder / "killed").read_text())
        before = {name for name, notes in lines.items() if notes and notes[0][2] < killed}
        # What others log of the last step of all four is no step without the victim.
        after = [
            (at, step)
            for name, notes in lines.items()
            for step, size, at in notes
            if at > killed and (name not in before or size < 4 or step <= dies_at - dies_at % EVERY + 1)
        ]
        recovery, again = min(after)[0] - killed, dies_at - min(after)[1] + 1
    return Result(first - beginning, step, recovery, again, max(losses))


def alone(steps: int) -> float:
    """The loss of one process."""
    task = Digits()
    for step in range(steps):
        task.optimizer.zero_grad()
        task.loss(task.model, step, 0, 1).backward()
        task.optimizer.step()
    return task.whole()


def row(runs: list[Result], is_start: bool) -> str:
    """The cells of a table."""
    loss = f"{median(one.loss for one in runs):.4f}"
    if is_start:
        return f"{spread([one.start for one in runs])} | {median(one.step for one in runs) * 1e3:.1f} ms | {loss}"
    return f"{spread([one.recovery for one in runs])} | {median(one.again for one in runs):g} | {loss}"


def spread(seconds: list[float]) -> str:
    return f"{median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", action="store_true", help="starts and steps, and no kill")
    parser.add_argument("--systems", default="", help="names of rows, separated by semicolons; all without it")
    parser.add_argument("--runs", type=int, default=3, help="of each system")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--call", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.call:
        name, folder, *numbers = options.call
        plan = Plan(folder, *map(int, numbers))
        called = globals()[name]
        called(plan) if name.startswith("drive") else called(*plan)
        return
    sys.path.insert(0, str(HERE.parents[1] / "tests"))
    from harness.two_hosts import missing, two_hosts

    if reason := missing():
        sys.exit(f"two hosts cannot be made here: {reason}")
    systems = START if options.start else KILL
    wanted = options.systems.split(";") if options.systems else list(systems)
    dies_at = 0 if options.start else options.steps // 2 + EVERY // 2
    expected = alone(options.steps)
    results: dict[str, list[Result]] = {name: [] for name in wanted}
    with two_hosts("10gbit") as hosts:
        for kind in dict.fromkeys(systems[name].engine for name in wanted):
            with engine(hosts, kind):
                for _ in range(options.runs):
                    for name in wanted:
                        if systems[name].engine == kind:
                            try:
                                found = run(hosts, systems[name], options.steps, dies_at)
                            except (AssertionError, subprocess.TimeoutExpired) as error:
                                print(f"{name}: a run has failed: {error}", file=sys.stderr)
                                continue
                            assert abs(found.loss - expected) < 1e-4, (name, found.loss, expected)
                            results[name].append(found)
                            print(name, json.dumps(found._asdict()), f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    print(f"\n2 hosts with 2 ranks each, {options.steps} steps, medians, load {os.getloadavg()[0]:.0f} at the end")
    print(f"loss of one process {expected:.4f}\n")
    heads = "start | step" if options.start else "without a step | steps made again"
    print(f"| | runs | {heads} | loss |")
    print("|---|---|---|---|---|")
    for name, runs in results.items():
        print(f"| {name} | {len(runs)} of {options.runs} | {row(runs, options.start) if runs else '| | '} |")


if __name__ == "__main__":
    main()
