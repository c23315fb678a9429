"""The allocator that is preloaded into ranks: where it is, and which processes get it.

Whatever starts a rank puts the library into ``LD_PRELOAD``, and the rank takes it out again: programs that it starts
are none of ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from ring_notebook.config import config

_VARIABLE = "LD_PRELOAD"
_SANITIZERS = ("libasan", "libtsan", "liblsan", "libubsan", "libclang_rt")
"""They have to come first, and watch an allocator of their own."""


def library() -> Path | None:
    """The shared library, beside the compiled core; None where there is none."""
    spec = find_spec("ring_notebook._core")
    path = Path(spec.origin).with_name("_preload.so") if spec is not None and spec.origin else None
    return path if path is not None and path.exists() else None


def ineligible() -> str:
    """Why ranks that this process starts do not get the library; empty when they do."""
    path = library()
    if config().allocator == "system":
        return "RING_ALLOCATOR=system"
    if path is None:
        return "it is not compiled"
    if any(character in str(path) for character in " :"):
        return f"LD_PRELOAD cannot name {path}, which contains a space or a colon"
    return ""


def preloaded(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of a rank, besides ``env``, that preload the library; none where it gets none."""
    if ineligible():
        return {}
    others = [entry for entry in _entries(env) if entry != str(library())]
    if any(Path(entry).name.startswith(_SANITIZERS) for entry in others):
        return {}
    return {_VARIABLE: ":".join([str(library()), *others])}


def unload_from_children() -> None:
    """Have programs that this process starts from now on do without the library."""
    others = [entry for entry in _entries(os.environ) if entry != str(library())]
    if others:
        os.environ[_VARIABLE] = ":".join(others)
    else:
        os.environ.pop(_VARIABLE, None)


def _entries(env: Mapping[str, str]) -> list[str]:
    return env.get(_VARIABLE, "").replace(":", " ").split()
