"""What the kernel and the engines know of one framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ring_notebook.frameworks.cell_calls import CellCalls, Hint


def _no_hints(_cell: CellCalls) -> Iterable[Hint]:
    return ()


@dataclass(frozen=True, slots=True)
class Framework:
    """One framework. An entry point is an instance; ``name``, ``face`` and ``modules`` are enough to train."""

    name: str
    face: str
    """The module that its cells see as ``ring``. An engine imports the face of the default framework when it starts."""
    modules: tuple[str, ...]
    """Prefixes of the names of its modules, and of modules that load it."""
    first_imports: tuple[str, ...] = ()
    """Modules that its first training step imports. With the face, one process imports them for all engines of a host;
    they start no thread."""
    gpu_word: str = ""
    """A word in the source of every cell that uses a GPU."""
    gpu_setup: str = ""
    """Lines with which a rank of a script chooses its GPU; in an engine the first GPU is the rank's own."""
    before: Mapping[str, str] = field(default_factory=dict)
    """By name: the ``module:function`` that an engine calls before a cell that uses the name."""
    count_waits: str = ""
    """The ``module:function`` that makes `core.other_waits` count waits in the framework's C++ code. An engine calls it
    before each cell."""
    threads: str = ""
    """The ``module:function`` that returns the number of threads of a rank. An engine calls it before each cell."""
    modes: str = ""
    """The ``module:function`` that remembers the framework's modes of a thread, such as whether gradients are recorded.
    An engine calls it before each cell. It returns a function, which an engine calls after a cell that failed or was
    interrupted: that puts changed modes back and returns their names."""
    held: str = ""
    """The ``module:function`` that says which of the given variables hold the memory of tensors, see `torch`'s."""
    empty_caches: str = ""
    """The ``module:function`` that gives the framework's cached memory of devices back, and returns its bytes."""
    lost_rank: str = ""
    """The ``module:function`` that says whether the framework raised an exception because another rank has gone."""
    original: str = ""
    """The ``module:function`` that returns the exception of a collective that the framework's runtime turned into its
    own; None for others. An engine calls it with the exception that ended a cell."""
    hints: Callable[[CellCalls], Iterable[Hint]] = _no_hints
    """Hints to a cell whose ranks would train apart or do the same work twice, with the line to change. The kernel
    calls it, and does not import the framework."""
    loaders: frozenset[str] = frozenset()
    """Calls that make a loader of batches: the last part of their dotted names."""

    def named_in(self, names: Iterable[str]) -> bool:
        """Whether one of ``names``, as `names_in` gives them, belongs to this framework or its face."""
        return any(f"{name}.".startswith((*self.modules, f"{self.face}.")) for name in names)
