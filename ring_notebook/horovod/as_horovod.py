"""Turns the hook on and off: what ``import horovod`` means in this process, and in those that it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

from ring_notebook.horovod.finder import Finder
from ring_notebook.horovod.names import NAME

__all__ = ["as_horovod", "variables"]

_finder = Finder()
_made: dict[str, ModuleType] = {}
"""The modules while the hook is off: those that a user has kept and those imported next are the same."""


def as_horovod() -> ExitStack:
    """Make ``import horovod`` mean Ring Notebook in this process, in imports within libraries too.

    An installed Horovod is left alone and not found meanwhile; modules of it that had been imported stay with who has
    them. Takes effect at once. Used as a context manager, or by ``close()`` of the result, it ends: imports find what
    they found before. Does nothing, also at the end, where it is in effect already.
    """
    leaving = ExitStack()
    if _finder not in sys.meta_path:
        before = _take()
        sys.modules.update(_made)
        sys.meta_path.insert(0, _finder)
        leaving.callback(_turn_off, before)
    return leaving


def variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that have the same effect in the Python programs that get them, and in those that they start."""
    paths = [str(Path(__file__).parent / "path"), *filter(None, [env.get("PYTHONPATH", "")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _turn_off(before: dict[str, ModuleType]) -> None:
    sys.meta_path.remove(_finder)
    _made.update(_take())
    sys.modules.update(before)


def _take() -> dict[str, ModuleType]:
    """The modules of this name, which are imported no longer."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == NAME}
