"""What the kernel and the engines know of one framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ring_notebook.frameworks.cell_calls import CellCalls, Hint

__all__ = ["Framework"]


def _no_hints(_cell: CellCalls) -> Iterable[Hint]:
    return ()


@dataclass(frozen=True, slots=True)
class Framework:
    """One framework. An entry point gives an instance; ``name``, ``face`` and ``modules`` are enough to train."""

    name: str
    face: str
    """The module that ``ring`` is in its cells. An engine imports the default framework's face when it starts."""
    modules: tuple[str, ...]
    """What the names of its modules, and of those that load it, begin with."""
    gpu_word: str = ""
    """A word in the source of every cell that uses a GPU."""
    gpu_setup: str = ""
    """Lines by which a rank of a script chooses its GPU; in an engine the rank's own GPU is the first."""
    before: Mapping[str, str] = field(default_factory=dict)
    """What an engine calls before a cell that names the key, as ``module:function``."""
    count_waits: str = ""
    """What has `core.other_waits` count how long the framework's own C++ waits for other ranks, as ``module:function``;
    an engine calls it before each cell."""
    threads: str = ""
    """How many threads a rank computes with, as ``module:function``; an engine calls it before each cell."""
    modes: str = ""
    """What remembers the framework's modes of a thread, such as whether gradients are recorded, and returns a function
    that puts back those that have changed since and returns their names, as ``module:function``; an engine calls it
    before each cell, and the function after one that has failed or was interrupted."""
    lost_rank: str = ""
    """Whether an exception is what the framework's C++ raises when another rank has gone, as ``module:function``."""
    hints: Callable[[CellCalls], Iterable[Hint]] = _no_hints
    """What in a cell makes ranks train apart or do the same work twice, and the line to change; called in the kernel,
    which does not import the framework."""
    loaders: frozenset[str] = frozenset()
    """Calls that make a loader of batches, by the last part of their dotted names."""

    def named_in(self, names: Iterable[str]) -> bool:
        """Whether one of ``names``, as `names_in` gives them, belongs to this framework or its face."""
        return any(f"{name}.".startswith((*self.modules, f"{self.face}.")) for name in names)
