"""Turns the import hook on and off: ``import horovod`` in this process, and in processes that it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

from ring_notebook.horovod.finder import Finder
from ring_notebook.horovod.names import NAME

_finder = Finder()
_made: dict[str, ModuleType] = {}
"""The modules while the hook is off, so that a later import gives the same modules that a user has kept."""


def as_horovod() -> ExitStack:
    """Make ``import horovod`` import Ring Notebook in this process, also in libraries.

    It takes effect at once. An installed Horovod is not changed and cannot be imported meanwhile; modules that were
    imported before stay valid. It ends with the ``with`` block, or with ``close()`` of the result: imports then find
    what they found before. Does nothing, also at the end, if it is already in effect.
    """
    leaving = ExitStack()
    if _finder not in sys.meta_path:
        before = _take()
        sys.modules.update(_made)
        sys.meta_path.insert(0, _finder)
        leaving.callback(_turn_off, before)
    return leaving


def variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables with the same effect in Python programs that get them, and in programs that those start."""
    paths = [str(Path(__file__).parent / "path"), *filter(None, [env.get("PYTHONPATH", "")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _turn_off(before: dict[str, ModuleType]) -> None:
    sys.meta_path.remove(_finder)
    _made.update(_take())
    sys.modules.update(before)


def _take() -> dict[str, ModuleType]:
    """Remove the modules of this name from `sys.modules`; returns them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == NAME}
