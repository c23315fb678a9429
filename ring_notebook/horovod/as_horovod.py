"""``import horovod`` in this process, and in processes that it starts: an import hook makes Horovod's modules."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from operator import attrgetter
from pathlib import Path
from types import ModuleType

from ring_notebook.horovod.names import MODULES, NAME, VERSION, below, bindings


class Finder(MetaPathFinder, Loader):
    """Finds and loads ``horovod`` and its modules; no other finder is asked for them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of Horovod. Raises ModuleNotFoundError with a list of those that exist here."""
        if fullname.partition(".")[0] != NAME:
            return None
        if fullname not in MODULES:
            there = ", ".join(name for name in MODULES if name.count(".") <= 1)
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: Ring Notebook {VERSION}, which stands in for {NAME} here, has {there} "
                "and their submodules; leave out --horovod or as_horovod() to import an installed Horovod"
            )  # without `name`: with it ``from horovod import NAME`` would show a shorter message
        return ModuleSpec(fullname, self, origin="Ring Notebook", is_package=bool(below(fullname)))

    def exec_module(self, module: ModuleType) -> None:
        """Bind the names of ``module``. A package below the top also loads its modules, as in Horovod."""
        public: list[str] = []
        for theirs, ours, own in bindings(module.__name__):
            source = import_module(ours)
            names = {name: name for name in source.__all__} if own == "*" else {theirs: own}
            vars(module).update({name: attrgetter(path)(source) for name, path in names.items()})
            public += [name for name in names if not name.startswith("_")]
        vars(module).update(__all__=sorted(public), __doc__=f"Horovod's {module.__name__}, of Ring Notebook {VERSION}.")
        for name in below(module.__name__) if module.__name__ != NAME else ():
            import_module(name)


_finder = Finder()
_made: dict[str, ModuleType] = {}
"""The modules while the hook is off, so that a later import returns the same modules."""


def as_horovod() -> ExitStack:
    """Make ``import horovod`` import Ring Notebook in this process, also in libraries.

    It takes effect at once. An installed Horovod is not changed and cannot be imported meanwhile; modules that were
    imported before stay valid. It ends with the ``with`` block, or with ``close()`` of the result: then imports work as
    before. A second call while it is in effect does nothing, not even at its end.
    """
    leaving = ExitStack()
    if _finder not in sys.meta_path:
        before = _take()
        sys.modules.update(_made)
        sys.meta_path.insert(0, _finder)
        leaving.callback(_turn_off, before)
        for ours in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & set(os.environ):
            theirs = f"HOROVOD_{ours.replace('WORLD_', '')}"  # as horovodrun sets it
            os.environ[theirs] = os.environ[ours]
            leaving.callback(os.environ.pop, theirs, None)
    return leaving


def variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables with the same effect in Python programs that get them, and in their child programs."""
    paths = [str(Path(__file__).parent / "path"), *filter(None, [env.get("PYTHONPATH", "")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _turn_off(before: dict[str, ModuleType]) -> None:
    sys.meta_path.remove(_finder)
    _made.update(_take())
    sys.modules.update(before)


def _take() -> dict[str, ModuleType]:
    """Remove the modules of this name from `sys.modules`; returns them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == NAME}
