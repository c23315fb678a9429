"""The process that imports what engines need and forks them: begun before a cluster asks, kept while it restarts.

Imports take most of a start. `%load_ext` begins them, so that they end while a user reads or the notebook does other
things, and `%ring restart` finds them done. The process ends with `%ring stop`, and with a cluster that dies.
"""

from __future__ import annotations

import os
import secrets
import site
import subprocess
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread

from ring_notebook import frameworks
from ring_notebook.errors import RingError
from ring_notebook.launch.batch_commands import login_node_of
from ring_notebook.launch.hosts_of_job import find_allocation
from ring_notebook.launch.launchers.find_launcher import find_launcher
from ring_notebook.launch.launchers.own_launchers import Own
from ring_notebook.launch.supervisor.fork_server import later, start_server
from ring_notebook.launch.supervisor.forked_rank import ADDRESS, answers, fixed
from ring_notebook.launch.supervisor.inherited_variables import without_outer_job
from ring_notebook.machine.gpus import gpus
from ring_notebook.machine.hardware import cores
from ring_notebook.rank.rank_threads import thread_variables

_OF_AN_ENGINE = (
    "ring_notebook.engine.engine_program",
    "ipykernel.debugger",  # which no engine uses, and every one imports
    "ring_notebook.engine.setup",
    "ring_notebook.engine.runner",
)


def shared_imports() -> tuple[str, ...]:
    """The modules of an engine and of the default framework, as `start_server` takes them."""
    framework = frameworks.default()
    return (*_OF_AN_ENGINE, framework.face, *map(later, framework.first_imports))


class EngineForks:
    """The process, for engines of this host. It ends with this one, and with `close`.

    It is not started if ``unwanted``, called in a thread, returns true.
    """

    def __init__(self, unwanted: Callable[[], bool] = lambda: False) -> None:
        self._unwanted = unwanted
        self.address = f"@ring-{secrets.token_hex(16)}"
        self._surroundings = _surroundings()
        self._started = Event()
        self._process: subprocess.Popen[bytes] | None = None
        Thread(target=self._live, name="ring-forks", daemon=True).start()

    def _live(self) -> None:
        """Start it and wait until it ends: the Linux kernel ends it with the thread that has started it."""
        environment = without_outer_job(os.environ)
        environment |= thread_variables(max(2, cores()), environment)
        try:
            if self._unwanted():
                return
            with suppress(OSError):
                self._process = start_server(self.address, shared_imports(), environment, apart=True)
        finally:
            self._started.set()
        if self._process is not None:
            self._process.wait()

    def usable(self) -> bool:
        """Whether it lives, and its forks still equal a process that is started now."""
        self._started.wait()
        return self._surroundings == _surroundings() and self._process is not None and answers(self.address)

    def close(self) -> None:
        """End it, and engines that are left."""
        self._started.wait()
        if self._process is not None:
            self._process.kill()


_ahead: EngineForks | None = None
_lock = Lock()


def begin_ahead() -> None:
    """Begin the imports for the first cluster, if its engines will probably run on this host."""
    global _ahead
    with _lock:
        if _ahead is None and _possible():
            _ahead = EngineForks(_under_batch_system)


def take_forks(here: bool = True) -> EngineForks | None:
    """The process that was begun, or a new one; the cluster closes it. None with GPUs, or without ``here``."""
    global _ahead
    with _lock:
        begun, _ahead = _ahead, None
    if begun is not None and here and begun.usable():
        return begun
    if begun is not None:
        begun.close()
    return EngineForks() if here and _possible() else None


def _possible() -> bool:
    """Whether our supervisor starts engines; false with GPUs, which is untested, and where a process forks all."""
    if gpus() or ADDRESS in os.environ:
        return False
    try:
        return isinstance(find_launcher(), Own)
    except (RingError, OSError, ValueError):  # a start reports it
        return False


def _under_batch_system() -> bool:
    """Whether this host is a login node, which others share, or in an allocation, which may have many hosts."""
    try:
        return find_allocation() is not None or login_node_of() is not None
    except (ValueError, OSError):  # a start reports it
        return True


def _surroundings() -> object:
    """What makes a fork differ from a new process when it changes: environment, folder, packages."""
    environment = without_outer_job(os.environ)
    ours = {name: value for name, value in environment.items() if name.startswith("RING_")}
    folders = [*site.getsitepackages(), site.getusersitepackages()]  # pip adds to them what it installs
    changed = [os.stat(folder).st_mtime_ns for folder in folders if os.path.isdir(folder)]
    return fixed(environment), ours, os.getcwd(), changed
