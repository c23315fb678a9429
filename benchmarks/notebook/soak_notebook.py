"""An hour of a notebook that trains, logs, forks, fails, is interrupted, loses ranks and restarts: nothing may grow.

    PYTHONPATH=tests .venv/bin/python benchmarks/notebook/soak_notebook.py [--minutes 60] [--ranks 2] [--pause 2.0]

A real kernel executes the cells. They come in rounds: a rank is killed and healed, or in every third round all engines
are restarted, and then come all of `CELLS`. At the end of each round, when all is idle, this process looks from outside
at every process that the kernel has started: memory (its own, and its part of what processes share; no pages of files),
descriptors, threads, pages of ring memory; names in /dev/shm, and the number of processes. Prints a line for each kind,
and ends with an error when one is greater in the last third of the rounds than in the first third.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from harness.leftovers import TOKEN, own_shared_memory, processes_with
from notebook.kernel import Notebook

WARM = 3  # rounds until every process holds what it needs
MIB = 1 << 20
# What may come in addition in an hour. The C library's arenas and Python's own heap do not give back at once.
SLACK = {"memory": 24.0, "descriptors": 2.0, "threads": 1.0, "ring memory": 8.0, "processes": 0.0, "/dev/shm": 0.0}
ROLES = {
    "controller": "notebook.cluster.controller",
    "supervisor": "launch.supervise",
    "engine": "engine.startup.engine_program",
    "kernel": "ipykernel_launcher",
}


@dataclass(frozen=True)
class Cell:
    """A cell, and the name of the error that it has to end with; ``stop``: the kernel is interrupted meanwhile."""

    source: str
    error: str = ""
    stop: bool = False


CELLS = (
    Cell(
        "%%ringtrain --name train\n"
        "import torch\n"
        "data = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randn(512, 1))\n"
        "model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))\n"
        "model, optimizer, loader = ring.prepare(\n"
        "    model, torch.optim.Adam(model.parameters()), torch.utils.data.DataLoader(data, batch_size=16))\n"
        "for epoch in range(4):\n"
        "    for x, y in ring.track(loader):\n"
        "        optimizer.zero_grad()\n"
        "        loss = torch.nn.functional.mse_loss(model(x), y)\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        "        ring.log(loss=loss, epoch=epoch)\n"
    ),
    Cell("%%ringtrain --name flood\nfor i in range(20_000): ring.log(a=i, b=i * 2)\nprint('line\\n' * 2_000)"),
    Cell(
        "%%ringtrain --name memory\n"
        "import torch\n"
        "large = [torch.ones(2_000_000) for _ in range(4)]\n"
        "for _ in range(3):\n    for one in large: ring.allreduce_(one)\n"
        "given = ring.empty(4_000_000)\ngiven.zero_()\nring.allreduce_(given)\ndel large, given"
    ),
    Cell(
        "%%ringtrain --name fork\n"
        "import os, subprocess, sys, torch\n"
        "loader = torch.utils.data.DataLoader(torch.arange(32.0), batch_size=4, num_workers=1)\n"
        "seen = sum(len(batch) for batch in loader)\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "subprocess.run([sys.executable, '-c', ''], check=True)\n"
        "ring.allreduce(torch.ones(1_000_000))"
    ),
    Cell("%%ringtrain --name raise\nif ring.rank() == 0: 1 / 0\nring.barrier()", "ZeroDivisionError"),
    Cell(
        "%%ringtrain --name disagree\nimport torch\nring.allreduce(torch.ones(2 + ring.rank()))", "CollectiveMismatch"
    ),
    Cell("%%ringtrain --name leave\nif ring.rank(): ring.barrier()", "CollectiveAborted"),
    Cell(
        "%%ringtrain --name wait\nimport pathlib\npathlib.Path('waits').touch()\nif ring.rank() == 0: ring.barrier()\n"
        "while True: pass",
        "KeyboardInterrupt",
        stop=True,
    ),
    Cell("pushed = list(range(1000))\n%ring push pushed\n%ring pull pushed\n%ring status\n%ring runs"),
    Cell("%%ringtrain --name plot\nimport matplotlib.pyplot as plt\nplt.plot(range(10))\nplt.show()\nplt.close('all')"),
)
DIES = Cell(
    "%%ringtrain --name die\nimport os\nif ring.rank() == 1: os.kill(os.getpid(), 9)\nring.barrier()", "ClusterError"
)
HEAL, RESTART = Cell("%ring heal"), Cell("%ring restart")


def execute(notebook: Notebook, cell: Cell, folder: Path) -> None:
    """Execute a cell, which must end as it says."""
    waits = folder / "waits"
    waits.unlink(missing_ok=True)
    outputs = notebook.run(cell.source, waits.exists if cell.stop else None)
    notebook.document.cells.clear()
    errors = [output["ename"] for output in outputs if output["output_type"] == "error"]
    if errors != ([cell.error] if cell.error else []):
        shown = [output for output in outputs if output["output_type"] in ("error", "stream")]
        sys.exit(f"ended with {errors}, not {cell.error or 'well'}: {cell.source}\n{shown}")


def look(token: str) -> Counter[str]:
    """What the processes hold now, by kind and role; MiB for memory."""
    held: Counter[str] = Counter()
    shared: dict[int, int] = {}  # bytes of each ring memory, by inode
    for line in processes_with(TOKEN, token):
        pid, _, command = line.partition(" ")
        role = next((role for role, module in ROLES.items() if module in command), "other")
        process = Path("/proc") / pid
        try:
            rollup = dict(re.findall(r"^(\w+): +(\d+) kB$", (process / "smaps_rollup").read_text(), re.MULTILINE))
            descriptors = list((process / "fd").iterdir())
            threads = len(list((process / "task").iterdir()))
            for descriptor in descriptors:
                if os.readlink(descriptor).startswith("/memfd:ring "):
                    status = descriptor.stat()
                    shared[status.st_ino] = status.st_blocks * 512
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        held[f"memory of {role}"] += sum(int(rollup[kind]) * 1024 for kind in ("Pss_Anon", "Pss_Shmem", "SwapPss"))
        held[f"descriptors of {role}"] += len(descriptors)
        held[f"threads of {role}"] += threads
        held["processes"] += 1
    for name in held:
        if name.startswith("memory"):
            held[name] //= MIB
    held["ring memory"] = sum(shared.values()) // MIB
    held["/dev/shm"] = len(list(Path("/dev/shm").rglob("*")))
    return held


def idle(token: str) -> Counter[str]:
    """What is held when nothing changes any more: the least of a few looks."""
    looks = []
    for _ in range(4):
        time.sleep(0.5)
        looks.append(look(token))
    return Counter({name: min(one[name] for one in looks) for name in looks[-1]})


def judge(rounds: list[Counter[str]]) -> list[str]:
    """Print what each kind was in the first and in the last third of the rounds; return those that have grown."""
    third = max(1, len(rounds) // 3)
    grown = []
    print("\n| held | first third | last third | least | most |\n|---|---|---|---|---|")
    for name in sorted(set().union(*rounds)):
        values = [one[name] for one in rounds]
        first, last = statistics.median(values[:third]), statistics.median(values[-third:])
        print(f"| {name} | {first:g} | {last:g} | {min(values)} | {max(values)} |")
        if last - first > SLACK[name.split(" of ")[0]]:
            grown.append(f"{name}: {first:g} -> {last:g}")
    return grown


def main() -> None:
    """Rounds until the time is over, then judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between two cells")
    options = parser.parse_args()
    token = os.environ.setdefault(TOKEN, f"soak {os.getpid()}")
    own_shared_memory()
    folder = Path(tempfile.mkdtemp(prefix="ring-soak-"))
    notebook = Notebook(folder)
    rounds: list[Counter[str]] = []
    begun = time.monotonic()
    cells = 0
    try:
        execute(notebook, Cell(f"%load_ext ring_notebook\n%ring start -n {options.ranks}"), folder)
        while time.monotonic() - begun < 60 * options.minutes:
            last = [DIES, HEAL] if len(rounds) % 3 else [DIES, RESTART]
            for cell in (*last, *CELLS):
                execute(notebook, cell, folder)
                cells += 1
                time.sleep(options.pause)
            rounds.append(idle(token))
            print(
                f"round {len(rounds)}, {time.monotonic() - begun:.0f} s: {dict(sorted(rounds[-1].items()))}", flush=True
            )
    finally:
        notebook.close()
    print(f"{cells} cells in {len(rounds)} rounds and {(time.monotonic() - begun) / 60:.0f} minutes")
    grown = judge(rounds[WARM:])
    left = [*processes_with(TOKEN, token), *(str(path) for path in Path("/dev/shm").iterdir())]
    if grown or left:
        sys.exit("\n".join(["something has grown or was left behind:", *grown, *left]))


if __name__ == "__main__":
    main()
