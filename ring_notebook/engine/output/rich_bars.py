"""rich on a rank draws progress as on a terminal, whose rows the panel shows as they change.

In what looks like a notebook rich draws into a widget, which a rank has not, and clears the output of the cell.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["install"]

_PATCHED = "rich.live"


class _Patch(MetaPathFinder, Loader):
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
    """The ``__init__`` of a Live that uses a ``console`` like a terminal in place of one like a notebook."""

    @wraps(initialize)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if self.console.is_jupyter:
            self.console = console(force_jupyter=False, force_terminal=True, width=self.console.width)

    return wrapped


def install() -> None:
    """Change rich in this process, once; rich itself is imported when a cell does."""
    if not any(isinstance(finder, _Patch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Patch())
