"""How soon a notebook computes: from an empty kernel to a first cell and a first training step, and after a restart.

    python benchmarks/notebook/first_second.py [--ranks 2] [--rounds 3] [--pause 0] [--python VENV/bin/python ...]

Medians of the rounds, each in a new kernel: seconds by the clock, and of processor time in all processes of the
notebook until the cell has ended. With --pause somebody reads for so long after `%load_ext`. Several interpreters take
turns, so that a busy machine is the same for all. Modules are read as bytecode, as pip leaves them, whatever
PYTHONDONTWRITEBYTECODE says here; in a fresh checkout a round that is not counted compiles them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress

import psutil
from answers import FIRST_STEP, processor_time
from jupyter_client import KernelManager

CELLS = {
    "`%load_ext ring_notebook`": "%load_ext ring_notebook",
    "`%ring start`": "%ring start -n {ranks}",
    "first cell": "%%ringtrain\nprint(ring.rank())",
    "first training step": f"%%ringtrain\n{FIRST_STEP}",
    "`%ring restart`": "%ring restart",
    "first cell after it": "%%ringtrain\nprint(ring.rank())",
    "first training step after it": f"%%ringtrain\n{FIRST_STEP}",
}


def main() -> None:
    """Print a table for each interpreter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--python", action="append", type=os.path.abspath)
    given = parser.parse_args()
    found: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    ends: dict[str, str] = {}
    for number in range(given.rounds + 1):
        for python in given.python or [sys.executable]:
            rows = found[python] if number else defaultdict(list)
            ends[python] = one_kernel(python, given.ranks, given.pause if number else 0.0, rows)
    for python, rows in found.items():
        given_time = f"{given.ranks} ranks, medians of {given.rounds}, {given.pause:g} s after %load_ext"
        print(f"{python}: {given_time}; {ends[python]}")
        print("\n| | s | s of processors |\n|---|---|---|")
        for what, times in rows.items():
            print("| {} | {:.2f} | {:.2f} |".format(what, *map(statistics.median, zip(*times, strict=True))))


def one_kernel(python: str, ranks: int, pause: float, rows: dict[str, list[tuple[float, float]]]) -> str:
    """Run the cells in a new kernel, and add what each takes to ``rows``. Returns how many processes there are."""
    manager = KernelManager()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "RING_RUNS_DIR": f"{folder}/runs", "PYTHONSAFEPATH": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        manager.kernel_spec.argv[:] = command
        manager.start_kernel(env=environment, cwd=folder)
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(60)
            kernel = psutil.Process(manager.provisioner.pid)
            first = spent(kernel), time.perf_counter()
            for what, source in CELLS.items():
                before, started = spent(kernel), time.perf_counter()
                answer = client.execute_interactive(source.format(ranks=ranks), timeout=120, output_hook=lambda _: None)
                assert answer["content"]["status"] == "ok", answer["content"]["evalue"]
                rows[what].append((time.perf_counter() - started, spent(kernel) - before))
                if what == "first cell":
                    rows["empty kernel to first cell"].append(
                        (time.perf_counter() - first[1] - pause, spent(kernel) - first[0])
                    )
                if source.startswith("%load_ext"):
                    time.sleep(pause)
            return size_of(kernel)
        finally:
            client.stop_channels()
            manager.shutdown_kernel()


def spent(kernel: psutil.Process) -> float:
    """Seconds of processor time of a kernel and all processes below it."""
    total = 0.0
    for process in (kernel, *kernel.children(recursive=True)):
        with suppress(psutil.Error):
            total += processor_time(process)
    return total


def size_of(kernel: psutil.Process) -> str:
    """How many processes and listening sockets a notebook has, and their memory."""
    processes = [kernel, *kernel.children(recursive=True)]
    sockets = sum(one.status == psutil.CONN_LISTEN for process in processes for one in process.net_connections("tcp"))
    memory = sum(process.memory_full_info().pss for process in processes) / 1e6
    return f"{len(processes)} processes with {sockets} listening sockets, {memory:.0f} MB"


if __name__ == "__main__":
    main()
