"""MPI in the cells of a cluster whose ranks may die: until then MPI works, after that calls raise and do not hang.

MPICH (5.0) does not notice that a process has died unless the others are ended too. A barrier or a receive then spins
for ever and cannot be interrupted; revoke is not implemented, and shrink spins too. A process that is started later
cannot join the communicators of the others.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.core import world
from ring_notebook.core.place import unname_shared_memory
from ring_notebook.errors import MPIMissingError
from ring_notebook.rank.rank_variables import NO_MPI, STARTED_AGAIN

_MODULE = "mpi4py.MPI"
_ADVICE = (
    "MPI.COMM_WORLD needs all ranks that were started together; `%ring restart` gives it back. "
    "The functions of `ring` work without it"
)


def begin() -> None:
    """Start MPI together with all other engines.

    Withdraw it in an engine that was started later, and where MPICH, which we bring, would end the engine.
    """
    if os.environ.get(STARTED_AGAIN):
        withdraw(f"this rank was started again after a death, or to grow, and MPI cannot take it in: {_ADVICE}")
        return
    if find_spec("mpi4py") is None:  # then no cell can use MPI
        return
    if why := os.environ.get(NO_MPI):
        withdraw(f"{why}. The functions of `ring` work without it")
        return
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the same on all ranks, which have one environment
        withdraw(f"mpi4py finds no MPI here; `pip install mpich` brings one ({error})")
        return
    MPI.COMM_WORLD.Barrier()
    unname_shared_memory()


def withdraw_from_survivors(lost: Sequence[int]) -> None:
    """Withdraw MPI when ranks that it needs, ``lost``, have died."""
    if _MODULE in sys.modules and lost:
        names = ", ".join(map(str, lost))
        withdraw(f"MPI has lost rank{'s' * (len(lost) > 1)} {names}, which died: {_ADVICE}")


def withdraw_unless_whole() -> None:
    """Withdraw MPI when the ranks that have formed are not those that were started together."""
    if _MODULE in sys.modules and not world.has_mpi():
        withdraw(f"the cluster has other ranks than at its start, and MPI cannot take these in: {_ADVICE}")


def withdraw(why: str) -> None:
    """Make every use of MPI in this process raise MPIMissingError with ``why``.

    Replaces variables that refer to MPI.COMM_WORLD or the module. Inside other objects COMM_WORLD becomes the null
    communicator, for which mpi4py raises. Communicators there that the program has made itself are not changed.
    """
    module = sys.modules.pop(_MODULE, None)
    sys.meta_path.insert(0, _Refusal(why))
    if module is None:
        return
    vars(sys.modules["mpi4py"]).pop("MPI", None)
    instead = _Withdrawn(why)
    variables = InteractiveShell.instance().user_ns
    variables.update({name: instead for name, value in variables.items() if _is_of(module, value)})
    world_handle = ctypes.c_int.from_address(module._addressof(module.COMM_WORLD))
    world_handle.value = module._handleof(module.COMM_NULL)


def _is_of(module: ModuleType, value: object) -> bool:
    return value is module or isinstance(value, module.Comm)


class _Withdrawn:
    """Replaces MPI, or a communicator; every attribute raises."""

    def __init__(self, why: str) -> None:
        object.__setattr__(self, "_why", why)

    def __getattr__(self, name: str) -> NoReturn:
        raise MPIMissingError(object.__getattribute__(self, "_why"))


class _Refusal(importlib.abc.MetaPathFinder):
    """Makes the import of mpi4py.MPI raise."""

    def __init__(self, why: str) -> None:
        self._why = why

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name == _MODULE:
            raise MPIMissingError(self._why)
        return None
