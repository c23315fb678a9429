"""Progress bars of tqdm and rich on a rank: drawn as text, which the panel shows as it changes.

`tqdm.auto`, which Hugging Face's libraries use, chooses the widgets of `tqdm.notebook` in every ipykernel process,
engines included. In an ipykernel process rich draws into a widget, and clears the output of the cell.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_REPLACED = "tqdm.notebook"


class _TextBars(MetaPathFinder, Loader):
    """Finds a `tqdm.notebook` whose names are those of tqdm's text bars."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname == _REPLACED else None

    def exec_module(self, module: ModuleType) -> None:
        std: Any = import_module("tqdm.std")
        module.__dict__.update(
            __doc__="tqdm's text bars, under the names of tqdm.notebook: a rank has no widgets.",
            tqdm=std.tqdm,
            tqdm_notebook=std.tqdm,
            trange=std.trange,
            tnrange=std.trange,
            # tqdm.autonotebook checks this name, and uses this module where it is not None.
            IProgress=std.tqdm,
            WARN_NOIPYW="",
        )


_PATCHED = "rich.live"


class _RichOnATerminal(MetaPathFinder, Loader):
    """Finds rich's own `rich.live` and changes its Live when it is loaded."""

    def __init__(self) -> None:
        self._own: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == _PATCHED else None
        if spec is not None:
            self._own, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._own.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        module.__dict__["Live"].__init__ = _on_a_terminal(module.__dict__["Live"].__init__, module.__dict__["Console"])


def _on_a_terminal(initialize: Any, console: Any) -> Any:
    """An ``__init__`` of Live that replaces a notebook console by a terminal console."""

    @wraps(initialize)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if self.console.is_jupyter:
            self.console = console(force_jupyter=False, force_terminal=True, width=self.console.width)

    return wrapped


def install() -> None:
    """Change both libraries in this process, once; they are imported when a cell imports them."""
    for kind in (_TextBars, _RichOnATerminal):
        if not any(isinstance(finder, kind) for finder in sys.meta_path):
            sys.meta_path.insert(0, kind())
    sys.modules.pop(_REPLACED, None)
