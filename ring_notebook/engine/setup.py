"""Prepares an engine for runs, once after its start: ring memory, log, GPU, threads, framework."""

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
from pkgutil import resolve_name
from threading import Thread
from typing import Any

from ipykernel.kernelbase import Kernel
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.page import as_hook, display_page

from ring_notebook.config import config
from ring_notebook.core import world
from ring_notebook.engine import capture, debuggers, descriptors, dialogue, mpi_access, own_stack, tqdm_bars
from ring_notebook.engine.publisher import Spool
from ring_notebook.frameworks import default
from ring_notebook.machine.gpus import VISIBLE, gpus, gpus_of_engine
from ring_notebook.machine.process_life import resident
from ring_notebook.protocol.question import CONTROL
from ring_notebook.rank.named_interrupt import tell_executions
from ring_notebook.rank.rank_threads import threads_set
from ring_notebook.text.error_text import error_text

_preload: Thread | None = None
_rank = (0, 1)  # and how many there are
spool: Spool | None = None
"""The journal of this rank, in a cluster that outlives its notebook."""


def prepare(directory: str, journals: str, replaceable: bool) -> dict[str, Any]:
    """Prepare this engine and return its rank, size, pid, host, gpu, threads and status file.

    All engines that start together call it. ``directory`` is the cluster's, if it exists on this host. Where the
    cluster outlives its notebook, this rank keeps the records of its run for the next one in the folder ``journals``.
    With ``replaceable`` the engines find each other later, in `form`; else in this call. Raises CoreMissingError when
    the native core is not compiled here.
    """
    global _rank
    number, size, local_number = _find_rank(replaceable)
    _rank = number, size
    _keep_log(Path(directory) / "log", number)
    _pin_gpu(local_number)
    capture.prepare_figures()
    tqdm_bars.install()
    # Show the help of `name?` as output, because an engine has no pager.
    shell = InteractiveShell.instance()
    shell.set_hook("show_in_pager", as_hook(display_page), 0)
    # IPython sets it as a terminal has it; libraries such as Lightning then assume an interactive shell and start no
    # ranks.
    vars(sys).pop("ps1", None)
    # Before a framework is loaded, because its loggers keep the stream that they find.
    capture.redirect()
    dialogue.install()
    debuggers.install()
    _serve_control(Kernel.instance())
    # ipyparallel's handler waits for the end of the cell, but stopping a cluster must not.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    global _preload, spool
    if journals:
        spool = Spool(Path(journals), number)
    tell_executions(config().status_file)
    _preload = Thread(target=_load_face, name="ring-preload", daemon=True)
    _preload.start()
    return {
        "rank": number,
        "size": size,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "gpu": (gpus() or [""])[0],
        "threads": threads_set(),
        "status_file": config().status_file,
    }


def rank() -> int:
    """The rank of this engine among all engines of its cluster."""
    return _rank[0]


def size() -> int:
    return _rank[1]


def memory() -> int:
    """Bytes of memory that this process uses, including shared memory."""
    return resident(os.getpid())


def form(formation: int, members: list[int], size: int) -> None:
    """Form the living engines of a cluster of ``size``; all call it with the same, greater ``formation``."""
    global _rank
    world.form(formation, members, size)
    _rank = _rank[0], size
    mpi_access.withdraw_unless_whole()


def _find_rank(replaceable: bool) -> tuple[int, int, int]:
    """Rank and size in the cluster, and rank on this host."""
    if not replaceable:
        topology = world.prepare_host().topology
        mpi_access.begin()  # now, because MPI's start waits for all ranks, and a cell may run on only some of them
        return topology.rank, topology.size, topology.local_rank
    mpi_access.begin()
    number, size, local_number = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return number, size, local_number


def _keep_log(logs: Path, rank: int) -> None:
    """Redirect descriptors 1 and 2 to files; a file of its own gets the stack on a crash or SIGUSR1."""
    log = descriptors.redirect(logs, rank)
    faulthandler.enable(log, all_threads=False)
    own_stack.register(log if logs.is_dir() else None)


def wait_for_preload() -> None:
    """Wait until the default framework is loaded: an interrupt would leave its import half done."""
    if _preload is not None:
        _preload.join()


def _load_face() -> None:
    with suppress(ImportError):  # if the framework is not installed, a cell that needs it raises this again
        import_module(default().face)


def _pin_gpu(local_rank: int) -> None:
    if names := gpus():
        os.environ[VISIBLE] = gpus_of_engine(local_rank, names)


def _serve_control(kernel: Any) -> None:
    """Let the engine's ``kernel`` call functions for `Engines.call_beside`. They must not wait."""

    def on_request(stream: Any, ident: Any, request: dict[str, Any]) -> None:
        content = _answer(request["content"])
        kernel.session.send(stream, CONTROL.replace("request", "reply"), content, request, ident)

    kernel.control_handlers[CONTROL] = on_request


def _answer(content: dict[str, Any]) -> dict[str, Any]:
    """The result of the function, or its error, as JSON."""
    try:
        result = resolve_name(content["function"])(*content["args"])
        json.dumps(result)  # raises now if it is not JSON: it could not be sent, and the caller would wait
        return {"result": result}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error_text(error)}"}
