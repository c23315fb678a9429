"""The import hook that makes Horovod's modules from the table of names."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from operator import attrgetter
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
                f"No module named {fullname!r}: {NAME} is Ring Notebook {VERSION} here, which has {there} and their "
                "submodules; leave out --horovod or as_horovod() to import an installed Horovod"
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
