"""Eleven cells in five systems that run a notebook's cells on several processes: what a user sees, and how soon.

    python benchmarks/notebook/notebooks.py ours            # or px: both in this environment
    python benchmarks/notebook/notebooks.py jupyter-distributed --python VENV/bin/python
    python benchmarks/notebook/notebooks.py nbdistributed --python VENV/bin/python
    python benchmarks/notebook/notebooks.py monarch --python VENV/bin/python

Each system runs in a kernel of its own, two ranks, nothing but what its documentation tells a user to write. A line for
each cell: whether it did what was wanted, the seconds until the cell ended, and the end of what it showed. VENV needs
ipykernel, torch and tqdm beside the system.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

LIMIT = 30.0  # seconds for a cell; one that takes longer hangs
INTERRUPT_AFTER = 3.0
SECONDS_TO_END = 10.0
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class System:
    """How a user writes in one system what the cells need."""

    start: str
    everywhere: str  # {} is the code, also in the fields below
    on_one: str  # on rank 1 alone
    attach: str = ""  # what finds the ranks again after the kernel restarted
    rank: str = "rank"
    join: str = ""  # what makes torch.distributed ready
    module: str = "ipykernel_launcher"
    environment: dict[str, str] = field(default_factory=dict)
    settles: float = 0.0  # seconds after its start without which the first cell is lost

    def cell(self, code: str) -> str:
        """A cell that runs ``code`` on all ranks."""
        return self.everywhere.format(repr(code) if "{}" in self.everywhere and "run" in self.everywhere else code)


# In a module: an actor whose class a notebook defines cannot import torch.
_ACTOR = """
from monarch.actor import Actor, endpoint, current_rank
class Ranks(Actor):
    def __init__(self):
        self.names = {"rank": current_rank().rank}
    @endpoint
    def run(self, code):
        exec(code, self.names)
"""
_MONARCH = f"""
open("cell_actor.py", "w").write({_ACTOR!r})
from monarch.actor import this_host
from cell_actor import Ranks
ranks = this_host().spawn_procs(per_host={{"gpus": 2}}).spawn("ranks", Ranks)
"""
_PX = """
import ipyparallel
view = ipyparallel.Cluster(n=2, engines="mpi").start_and_connect_sync()[:]
view.block = True
view.activate()
view.execute("from mpi4py import MPI; rank = MPI.COMM_WORLD.rank; import os")
view.execute("os.environ.update(RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT='29531')")
view.execute("%load_ext autoreload\\n%autoreload 2")
"""
_TORCHRUN = "import torch.distributed as dist\nif not dist.is_initialized(): dist.init_process_group('gloo')\n"
SYSTEMS = {
    "ours": System(
        start="%load_ext ring_notebook\n%ring start -n 2 --keep --sync",
        everywhere="%%ringtrain\n{}",
        on_one="%%ringtrain -t 1\n{}",
        attach="%load_ext ring_notebook\n%ring attach",
        rank="int(__import__('os').environ['RANK'])",
        join="import torch.distributed as dist; ring.process_group()\n",
    ),
    "px": System(
        start=_PX,
        everywhere="%%px\n{}",
        on_one="%%px --targets 1\n{}",
        join=_TORCHRUN,
    ),
    "jupyter-distributed": System(
        start="%load_ext autoreload\n%autoreload 2\nimport os; rank = int(os.environ['RANK'])",
        everywhere="{}",
        on_one="%%rank 1\n{}",
        join=_TORCHRUN,
        module="jupyter_distributed.kernel",
        environment={"JUPYTER_DISTRIBUTED_BASE_KERNEL": "python3", "JUPYTER_DISTRIBUTED_WORLD_SIZE": "2"},
    ),
    "nbdistributed": System(
        start="%load_ext nbdistributed\n%dist_init -n 2",
        everywhere="{}",
        on_one="%%rank[1]\n{}",
        attach="%load_ext nbdistributed\n%dist_init -n 2",
        settles=15.0,
    ),
    "monarch": System(
        start=_MONARCH,
        everywhere="ranks.run.call({}).get()",
        on_one="ranks.slice(gpus=1).run.call_one({}).get()",
        join="import os; os.environ.update(RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', "
        f"MASTER_PORT='29532')\n{_TORCHRUN}",
    ),
}


@dataclass
class Shown:
    """What a cell showed, and in how many seconds it ended; ``asked``: it opened a prompt."""

    text: str
    seconds: float
    ended: bool
    asked: bool = False


class Kernel:
    """A kernel of one system in ``folder``."""

    def __init__(self, system: System, python: str, folder: Path) -> None:
        self.system = system
        self._manager = KernelManager()
        argv = [python, "-m", system.module, "-f", "{connection_file}"]
        mode = "message" if "distributed.kernel" in system.module else "signal"
        self._manager._kernel_spec = KernelSpec(argv=argv, display_name="", language="python", interrupt_mode=mode)
        path = f"{Path(python).absolute().parent}:{os.environ['PATH']}"  # some start a plain `python`
        self._place = {"cwd": str(folder), "env": {**os.environ, "PATH": path, **system.environment}}
        self._processes: list[psutil.Process] = []
        self._begin()

    def _begin(self) -> None:
        begun = time.monotonic()
        self._manager.start_kernel(**self._place)
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)
        self.seconds_to_begin = time.monotonic() - begun

    def run(self, code: str, interrupt_after: float = 0.0, answer: str = "") -> Shown:
        """Execute a cell, at most LIMIT seconds; interrupts it then, and after ``interrupt_after``."""
        started = time.monotonic()
        message = self._client.execute(code, allow_stdin=True)
        parts: list[str] = []
        asked = interrupted = False
        while (elapsed := time.monotonic() - started) < LIMIT:
            if interrupt_after and elapsed > interrupt_after and not interrupted:
                interrupted = True
                self._manager.interrupt_kernel()
            if self._client.stdin_channel.msg_ready():
                self._client.stdin_channel.get_msg()
                asked = True
                self._client.input(answer)
            try:
                got = self._client.get_iopub_msg(timeout=0.1)
            except Exception:  # queue.Empty: nothing yet
                continue
            parts.append(_text(got))
            own = got["parent_header"].get("msg_id") == message
            if own and got["msg_type"] == "status" and got["content"]["execution_state"] == "idle":
                return Shown(_words(parts), time.monotonic() - started, True, asked)
        self._manager.interrupt_kernel()
        return Shown(_words(parts), LIMIT, False, asked)

    def restart(self) -> None:
        """Restart the kernel, as its menu does."""
        self._remember()
        self._manager.restart_kernel(now=False)
        self._client.wait_for_ready(timeout=60)

    def close(self) -> None:
        """End the kernel and all that it has started."""
        self._remember()
        self._manager.shutdown_kernel(now=True)
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        # Who cleans up after others does so before it ends, and what was killed leaves its shared memory behind.
        _, living = psutil.wait_procs(self._processes, timeout=SECONDS_TO_END)
        for process in living:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _remember(self) -> None:
        kernel = psutil.Process(self._manager.provisioner.pid)
        self._processes += kernel.children(recursive=True)


def _words(parts: list[str]) -> str:
    """The text without colors, its words one space apart."""
    return " ".join(ANSI.sub("", "".join(parts)).split())


def _text(message: dict) -> str:  # type: ignore[type-arg]
    content = message["content"]
    if message["msg_type"] == "stream":
        return str(content["text"])
    if message["msg_type"] == "comm_msg":  # of a widget, which only a page shows
        return f"{content['data'].get('state', '')} "
    if message["msg_type"] == "error":
        return "\n".join(content["traceback"])
    return str(content.get("data", {}).get("text/plain", "")) + "\n" if "data" in content else ""


Cell = Callable[[Kernel], tuple[bool, Shown]]


def _said(kernel: Kernel, code: str, *wanted: str) -> tuple[bool, Shown]:
    shown = kernel.run(kernel.system.cell(code))
    return shown.ended and all(one in shown.text for one in wanted), shown


def _next_works(kernel: Kernel) -> bool:
    rank = kernel.system.rank
    return _said(kernel, f"print('next', {rank}, kept)", "next 0 7", "next 1 7")[0]


def _start(kernel: Kernel) -> tuple[bool, Shown]:
    shown = kernel.run(kernel.system.start)
    time.sleep(kernel.system.settles)
    first = kernel.run(kernel.system.cell("print('first cell')"))
    shown.seconds += first.seconds + kernel.seconds_to_begin + kernel.system.settles
    shown.text += first.text
    return shown.ended and "first cell" in first.text, shown


def _print(kernel: Kernel) -> tuple[bool, Shown]:
    return _said(kernel, f"kept = 7\nprint('rank', {kernel.system.rank})", "rank 0", "rank 1")


def _error(kernel: Kernel) -> tuple[bool, Shown]:
    code = f"if {kernel.system.rank} == 1: 1 / 0\ndist.barrier()"
    shown = kernel.run(kernel.system.cell(code))
    return shown.ended and "ZeroDivisionError" in shown.text and _next_works(kernel), shown


def _interrupt(kernel: Kernel) -> tuple[bool, Shown]:
    code = f"import time\nif {kernel.system.rank} == 1: time.sleep(100)\ndist.barrier()"
    shown = kernel.run(kernel.system.cell(code), interrupt_after=INTERRUPT_AFTER)
    in_time = shown.seconds > INTERRUPT_AFTER  # it did not end by itself
    shown.seconds -= INTERRUPT_AFTER
    return in_time and shown.ended and _next_works(kernel), shown


def _killed(kernel: Kernel) -> tuple[bool, Shown]:
    code = f"import os\nif {kernel.system.rank} == 1: os.kill(os.getpid(), 9)\ndist.barrier()"
    shown = kernel.run(kernel.system.cell(code))
    told = shown.ended and re.search(r"(?i)sigkill|killed|signal 9|exit code -9|rank 1.*died", shown.text) is not None
    return told, shown


def _tqdm(kernel: Kernel) -> tuple[bool, Shown]:
    ok, shown = _said(kernel, "from tqdm.auto import tqdm\nfor _ in tqdm(range(5)): pass")
    return ok and ("100%" in shown.text or "'value': 5" in shown.text), shown


def _breakpoint(kernel: Kernel) -> tuple[bool, Shown]:
    code = kernel.system.cell(f"if {kernel.system.rank} == 1:\n    breakpoint()\nprint('over')")
    shown = kernel.run(code, answer="c")
    return shown.asked and shown.ended, shown


def _subset(kernel: Kernel) -> tuple[bool, Shown]:
    code = "import os\nprint('here', os.getpid())"
    on_one = kernel.system.on_one
    shown = kernel.run(on_one.format(repr(code) if "run" in on_one and "{}" in on_one else code))
    return shown.ended and len(set(re.findall(r"here (\d+)", shown.text))) == 1, shown


def _module(kernel: Kernel) -> tuple[bool, Shown]:
    file = Path(kernel._place["cwd"]) / "helpers.py"  # type: ignore[arg-type]
    file.write_text("def f():\n    return 'old'\n")
    _said(kernel, "import helpers\nprint(helpers.f())")
    time.sleep(1.1)  # Python itself tells files apart by the second
    file.write_text("def f():\n    return 'new'\n")
    return _said(kernel, "print(helpers.f(), 'module')", "new module")


def _restarted(kernel: Kernel) -> tuple[bool, Shown]:
    kernel.restart()
    shown = kernel.run(kernel.system.attach or kernel.system.start)
    time.sleep(kernel.system.settles)
    after = kernel.run(kernel.system.cell(f"print('kept', kept, {kernel.system.rank})"))
    shown.text += after.text
    return "kept 7 0" in after.text and "kept 7 1" in after.text, shown


def _distributed(kernel: Kernel) -> tuple[bool, Shown]:
    code = f"{kernel.system.join}import torch\nx = torch.ones(1)\ndist.all_reduce(x)\nprint('sum', x.item())"
    return _said(kernel, code, "sum 2.0")


CELLS: dict[str, Cell] = {
    "start": _start,
    "print": _print,
    "torch.distributed": _distributed,
    "tqdm.auto": _tqdm,
    "subset": _subset,
    "changed module": _module,
    "breakpoint": _breakpoint,
    "error on one rank": _error,
    "interrupt in a collective": _interrupt,
    "variables after restart": _restarted,
    "killed rank": _killed,
}
# After one that may leave a system unusable, the next begins in a new kernel.
_ALONE = {"breakpoint", "error on one rank", "interrupt in a collective", "variables after restart", "killed rank"}


def main() -> None:
    """Run the cells in one system and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS))
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ring-cells-"))
    kernel: Kernel | None = None
    for name in given.cells:
        if kernel is None:
            kernel = Kernel(SYSTEMS[given.system], given.python, folder)
            if name != "start":
                _start(kernel)
                _print(kernel)
                _distributed(kernel)
        ok, shown = CELLS[name](kernel)
        took = f"{shown.seconds:6.2f} s" if shown.ended else "  hangs "
        print(f"{given.system:20} {name:26} {'yes' if ok else 'NO ':3} {took}  {shown.text[-160:]}", flush=True)
        if name in _ALONE:
            kernel.close()
            kernel = None
    if kernel is not None:
        kernel.close()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
