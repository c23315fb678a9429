"""Ring Notebook: distributed training driven from a notebook."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ring_notebook.errors import (
        ClusterError,
        CollectiveAborted,
        CollectiveError,
        CollectiveMismatch,
        CollectiveTimeout,
        RingError,
        RunFailed,
        RunTimeout,
    )
    from ring_notebook.horovod.as_horovod import as_horovod
    from ring_notebook.launch.run_function import run
    from ring_notebook.notebook.cluster.cluster import Cluster
    from ring_notebook.notebook.lab.lab import Lab
    from ring_notebook.notebook.run.notifications import notify
    from ring_notebook.notebook.run.run import Run
    from ring_notebook.rank.rendezvous_server import RendezvousServer

__all__ = [
    "Cluster",
    "ClusterError",
    "CollectiveAborted",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Lab",
    "RendezvousServer",
    "RingError",
    "Run",
    "RunFailed",
    "RunTimeout",
    "__version__",
    "as_horovod",
    "load_ipython_extension",
    "notify",
    "run",
]
__version__ = "0.3.0"

# Name -> module. Loaded on first use, so that `import ring_notebook` is cheap in kernels and in ranks.
_LAZY = {
    "Cluster": "ring_notebook.notebook.cluster.cluster",
    "ClusterError": "ring_notebook.errors",
    "CollectiveAborted": "ring_notebook.errors",
    "CollectiveError": "ring_notebook.errors",
    "CollectiveMismatch": "ring_notebook.errors",
    "CollectiveTimeout": "ring_notebook.errors",
    "Lab": "ring_notebook.notebook.lab.lab",
    "RendezvousServer": "ring_notebook.rank.rendezvous_server",
    "RingError": "ring_notebook.errors",
    "Run": "ring_notebook.notebook.run.run",
    "RunFailed": "ring_notebook.errors",
    "RunTimeout": "ring_notebook.errors",
    "as_horovod": "ring_notebook.horovod.as_horovod",
    "notify": "ring_notebook.notebook.run.notifications",
    "run": "ring_notebook.launch.run_function",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(_load(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load(module: str) -> Any:
    from importlib import import_module

    try:
        loaded = import_module(module)
        if sys.flags.optimize > 1 and "ipyparallel" in sys.modules:
            import_module("ipyparallel.client.magics")  # which it does with its first client
        return loaded
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", __name__):
            raise
        raise ModuleNotFoundError(
            f"{module} needs {missing}, which is not installed: `pip install ring-notebook` brings it", name=error.name
        ) from None
    except AttributeError as error:
        if sys.flags.optimize > 1:
            raise ImportError(
                f"{module} needs ipyparallel, which `python -OO` cannot import because that removes docstrings; use -O"
            ) from error
        raise


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """``%load_ext ring_notebook``: register ``%%ringtrain``, ``%%ringscale`` and ``%ring``."""
    _load("ring_notebook.notebook.cluster.engine_forks").begin_ahead()  # first: what follows takes as long
    _load("ring_notebook.notebook.magics.ipython_magics").register(shell)
