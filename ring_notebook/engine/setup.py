"""Makes an engine ready for runs, once after its start: ring memory, log, GPU, threads, framework."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

from ipykernel.kernelbase import Kernel
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.page import as_hook, display_page

from ring_notebook.core import world
from ring_notebook.engine import capture, debuggers, dialogue, mpi_access, own_stack, progress_bars
from ring_notebook.engine.publisher import Spool
from ring_notebook.error_text import error_text
from ring_notebook.frameworks import default
from ring_notebook.gpus import VISIBLE, gpus, gpus_of_engine
from ring_notebook.question import CONTROL
from ring_notebook.rank.rank_threads import threads_set

_preload: Thread | None = None
_rank = (0, 1, 0, 1)  # rank and size, and both on this host
spool: Spool | None = None
"""Where this rank keeps its records, in a cluster that outlives its notebook."""


def prepare(directory: str, keep: bool, replaceable: bool) -> dict[str, Any]:
    """Make this engine ready and say who it is: rank, size, pid, host, gpu, threads.

    Collective over all engines that start together. ``directory`` is the cluster's, where this host has it. With
    ``keep`` the cluster outlives its notebook, and this rank keeps the records of its run for the next one. With
    ``replaceable`` it has yet to `form`; else the engines find each other here. Raises
    CoreMissingError when the native core is not compiled here.
    """
    global _rank
    _rank = _find_rank(replaceable)
    number, size, local_number, _ = _rank
    _keep_log(Path(directory) / "log", number)
    _pin_gpu(local_number)
    capture.prepare_figures()
    progress_bars.install()
    # The help that `name?` asks for is shown as output: an engine has no pager.
    shell = InteractiveShell.instance()
    shell.set_hook("show_in_pager", as_hook(display_page), 0)
    # IPython sets it for a terminal; libraries, such as Lightning, take it for one and start no ranks.
    vars(sys).pop("ps1", None)
    # Before a framework is loaded, whose loggers keep the stream that they find.
    capture.redirect()
    dialogue.install()
    debuggers.install()
    _serve_control(Kernel.instance())
    # ipyparallel's handler waits for the cell to end; stopping a cluster must not.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    global _preload, spool
    if keep:
        spool = Spool(Path(directory) / "spool", number)
    _preload = Thread(target=_load_face, name="ring-preload", daemon=True)
    _preload.start()
    return {
        "rank": number,
        "size": size,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "gpu": (gpus() or [""])[0],
        "threads": threads_set(),
    }


def rank() -> int:
    """The rank of this engine among all engines of its cluster."""
    return _rank[0]


def memory() -> int:
    """Bytes that this process holds, memory that it shares included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def form(generation: int, members: list[int]) -> None:
    """Find the living engines of the cluster, all of which are called with the same, greater ``generation``."""
    world.form(generation, members)
    mpi_access.withdraw_unless_whole()


def _find_rank(replaceable: bool) -> tuple[int, int, int, int]:
    """Rank and size in the cluster, and on this host."""
    if not replaceable:
        topology = world.prepare_host().topology
        mpi_access.begin()  # where the ring does without, MPI waits for all ranks, and a cell may have some of them
        return topology.rank, topology.size, topology.local_rank, topology.local_size
    mpi_access.begin()
    number, size, local_number, local_size = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    return number, size, local_number, local_size


def _keep_log(logs: Path, rank: int) -> None:
    """Give this rank's standard output and error a file, with the stack where it crashes or gets SIGUSR1."""
    if has_log := logs.is_dir():
        log = os.open(logs / f"rank-{rank}.log", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    faulthandler.enable(2, all_threads=False)
    own_stack.register(has_log)


def wait_for_preload() -> None:
    """Return when the default framework is loaded: an interrupt would leave its import half done."""
    if _preload is not None:
        _preload.join()


def _load_face() -> None:
    with suppress(ImportError):  # where the framework is not installed, a cell that needs it raises this again
        import_module(default().face)


def _pin_gpu(local_rank: int) -> None:
    if names := gpus():
        os.environ[VISIBLE] = gpus_of_engine(local_rank, names)


def _serve_control(kernel: Any) -> None:
    """Have the engine's ``kernel`` call the functions that `Engines.call_beside` names. They must not wait."""

    def on_request(stream: Any, ident: Any, request: dict[str, Any]) -> None:
        content = _answer(request["content"])
        kernel.session.send(stream, CONTROL.replace("request", "reply"), content, request, ident)

    kernel.control_handlers[CONTROL] = on_request


def _answer(content: dict[str, Any]) -> dict[str, Any]:
    """What the function returns, or why it failed, as JSON."""
    try:
        module, _, name = content["function"].partition(":")
        result = getattr(import_module(module), name)(*content["args"])
        json.dumps(result)  # what is none cannot be sent, and the caller would wait
        return {"result": result}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error_text(error)}"}
