"""The frameworks that cells train with: what kernel and engines know of each.

A framework is an entry of `BUILT_IN`, or of the entry point group ``ring_notebook.frameworks`` of an installed package.
Nothing here imports a framework. A face registers its tensors with `ring_notebook.api.tensor_adapter`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import entry_points

from ring_notebook.config import config
from ring_notebook.errors import RingError
from ring_notebook.frameworks.cell_calls import Call, CellCalls, Hint, names_in, with_code_of_magics
from ring_notebook.frameworks.framework import Framework
from ring_notebook.frameworks.keras_hints import JAX, KERAS, TENSORFLOW
from ring_notebook.frameworks.torch_hints import TORCH

__all__ = [
    "BUILT_IN",
    "Call",
    "CellCalls",
    "Framework",
    "Hint",
    "default",
    "framework",
    "frameworks",
    "named",
    "names_in",
    "with_code_of_magics",
]

_GROUP = "ring_notebook.frameworks"

BUILT_IN = (TORCH, KERAS, TENSORFLOW, JAX)
"""The frameworks whose faces come with this package; the first is the default."""


@lru_cache(maxsize=1)
def frameworks() -> tuple[Framework, ...]:
    """`BUILT_IN`, then those of other packages. An entry point that fails to load is left out with a warning."""
    found = {known.name: known for known in BUILT_IN}
    for entry in entry_points(group=_GROUP):
        try:
            loaded = entry.load()
        except Exception as error:
            warnings.warn(f"entry point {entry.name!r} ({entry.value}) failed to load: {error}", stacklevel=2)
        else:
            found.setdefault(loaded.name, loaded)
    return tuple(found.values())


def framework(name: str) -> Framework:
    """The framework ``name``. Raises RingError with the known names if there is none."""
    for known in frameworks():
        if known.name == name:
            return known
    raise RingError(
        f"unknown framework {name!r}; known are {', '.join(known.name for known in frameworks())}. Install the "
        "package that brings it, here and on every engine"
    )


def default() -> Framework:
    """The framework of cells that name none: RING_FRAMEWORK, else the first of `BUILT_IN`."""
    return framework(config().framework) if config().framework else BUILT_IN[0]


def named(names: Iterable[str]) -> Framework | None:
    """The framework that a cell with these names uses. Of several, the default one; None if it uses none."""
    given = set(names)
    return next((known for known in (default(), *frameworks()) if known.named_in(given)), None)
