"""What a snapshot costs: seconds and bytes, beside `torch.save` of the same tensors, and Kishu for one process.

    python benchmarks/notebook/snapshots.py [--mebibytes 96] [--rounds 3] [--kishu PYTHON]

A rank has a model and the state of Adam, together so many MiB. ``torch.save`` writes the two state_dicts, and the file
is synced to disk, as those of a snapshot are. "Again" is a snapshot when nothing has changed since the last one, "a
step on" after every parameter and state has changed. PYTHON is an interpreter with kishu and torch (``pip install kishu
torch`` in an environment of its own); Kishu keeps what a cell has changed when the cell has ended, so the time is that
of a cell beyond what its lines take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ring_notebook.files import snapshot_files
from ring_notebook.files.snapshot_files import Snapshot
from ring_notebook.notebook.cluster.cluster import Cluster

MIB = 1 << 20
SET_UP = """
import os, time, torch
torch.manual_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(1024, {width}) for _ in range(8)])
optimizer = torch.optim.Adam(model.parameters())

def step():
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

step()
"""
SAVE = """
began = time.perf_counter()
with open({path!r}, "wb") as file:
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.flush()
    os.fsync(file.fileno())
saved = time.perf_counter() - began
began = time.perf_counter()
for one, state in zip([model, optimizer], torch.load({path!r}, weights_only=True)):
    one.load_state_dict(state)
loaded = time.perf_counter() - began
size = os.path.getsize({path!r})
"""
KISHU = """
import json, os, sys, time
from pathlib import Path

import nbformat
from IPython.core.interactiveshell import InteractiveShell
from kishu.jupyterint import KishuForJupyter
from kishu.notebook_id import NotebookId

shell, path = InteractiveShell.instance(), Path("notebook.ipynb")
nbformat.write(nbformat.v4.new_notebook(), path)
kishu = KishuForJupyter(NotebookId(path=path, key="key", kernel_id="kernel"), shell)
kishu.install_kishu_hooks()

def run(source):
    began = time.perf_counter()
    lines = f"import time\\n_began = time.perf_counter()\\n{source}\\n_took = time.perf_counter() - _began"
    assert shell.run_cell(lines, store_history=True).success
    return time.perf_counter() - began - shell.user_ns["_took"], os.path.getsize(kishu.database_path())

first, kept, again, on = run(SOURCE), kishu._kishu_commit.keys_like("")[-1], run("1"), run("step()")
began = time.perf_counter()
kishu.checkout(kept, skip_notebook=True)
print("RESULT", json.dumps([first, again, on, time.perf_counter() - began]))
"""


def median_of(rounds: int, measured: Callable[[], float]) -> float:
    return statistics.median(measured() for _ in range(rounds))


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def row(name: str, seconds: float | None, mebibytes: float, restore: float | None = None) -> None:
    cells = [name, f"{mebibytes:.1f}", *("" if one is None else f"{one:.2f}" for one in (seconds, restore))]
    print(f"| {' | '.join(cells)} |", flush=True)


def measure(ranks: int, width: int, rounds: int, folder: Path) -> None:
    with Cluster(ranks) as cluster:
        cluster.run(SET_UP.format(width=width)).wait()
        taken: list[Snapshot] = []

        def keep(name: str) -> float:
            return timed(lambda: taken.append(cluster.snapshot(name)))

        def anew() -> float:
            for one in snapshot_files.found(snapshot_files.root())[0]:
                snapshot_files.remove(one)
            return keep("first")

        def on() -> float:
            cluster.run("step()").wait()
            return keep("first")

        what = f"snapshot of {ranks} rank{'s' * (ranks > 1)}"
        first = median_of(rounds, anew)
        row(what, first, taken[-1].bytes / MIB, median_of(rounds, lambda: timed(lambda: cluster.restore("first"))))
        again = median_of(rounds, lambda: keep("again"))
        row(f"{what}, again", again, sum(one["written"] for one in taken[-1].about["ranks"]) / MIB)
        after = median_of(rounds, on)
        row(f"{what}, a step on", after, sum(one["written"] for one in taken[-1].about["ranks"]) / MIB)
        if ranks == 1:
            path = str(folder / "saved.pt")
            runs = []
            for _ in range(rounds):
                cluster.run(SAVE.format(path=path)).wait()
                runs.append([cluster.pull(name) for name in ("saved", "loaded", "size")])
            saved, loaded, size = (statistics.median(column) for column in zip(*runs, strict=True))
            row("torch.save, torch.load", saved, size / MIB, loaded)


def measure_kishu(python: str, width: int, folder: Path) -> None:
    source = KISHU.replace("SOURCE", repr(SET_UP.format(width=width)))
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [python, "-c", source], cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    found: Sequence[str] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        raise SystemExit(f"Kishu failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    (first, size), (again, size_again), (on, size_on), checkout = json.loads(found[0].removeprefix("RESULT "))
    row("Kishu", first, size / MIB, checkout)
    row("Kishu, again", again, (size_again - size) / MIB)
    row("Kishu, a step on", on, (size_on - size_again) / MIB)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=float, default=96.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kishu", default="", metavar="PYTHON")
    arguments = parser.parse_args()
    width = max(1, round(arguments.mebibytes * MIB / (3 * 4 * 8 * 1025)))
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).absolute()
        os.environ["RING_RUNS_DIR"] = str(folder / "runs")
        print("| | MiB written | seconds | seconds to restore |\n|---|---|---|---|")
        for ranks in (1, 2):
            measure(ranks, width, arguments.rounds, folder)
        if arguments.kishu:
            measure_kishu(arguments.kishu, width, folder)


if __name__ == "__main__":
    main()
