"""tqdm on a rank draws its bars as text, which the panel shows; the widgets of `tqdm.notebook` are not shown.

`tqdm.auto`, which Hugging Face's libraries use, takes `tqdm.notebook` in every ipykernel process, engines included.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["install"]

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
            # What tqdm.autonotebook looks for; it takes this module where the name is not None.
            IProgress=std.tqdm,
            WARN_NOIPYW="",
        )


def install() -> None:
    """Replace `tqdm.notebook` in this process, once; tqdm itself is imported when a cell does."""
    if not any(isinstance(finder, _TextBars) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TextBars())
    sys.modules.pop(_REPLACED, None)
