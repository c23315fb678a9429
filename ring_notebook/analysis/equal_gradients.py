"""Whether two trainings of logical ranks had the same gradients, and where they first differ.

They are compared by marks (`records.Gradients`): of each parameter's average, and of all gradients of a logical rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ring_notebook.protocol.records import Gradients
from ring_notebook.text.words import first_names, plural, ranks

Marks = dict[int, dict[str, list[int]]]
"""By step and name; several of a name where a step has several backward passes."""
_LOGICAL = "logical rank "
_MOST_NAMES = 3


def logical_name(rank: int) -> str:
    """The name of the mark of all gradients of a logical rank."""
    return f"{_LOGICAL}{rank}"


def marks_of(batches: Iterable[Gradients]) -> Marks:
    """The marks of all ranks of a run."""
    found: Marks = {}
    for batch in batches:
        for step, *marks in batch.rows():
            of_step = found.setdefault(step, {})
            for name, mark in zip(batch.names, marks, strict=True):
                of_step.setdefault(name, []).append(mark)
    return found


def first_difference(before: Marks, now: Marks) -> tuple[int, list[str]] | None:
    """The first step of both whose marks differ, and the names of these marks."""
    for step in sorted(before.keys() & now.keys()):
        one, other = before[step], now[step]
        if names := [name for name in other if name in one and one[name] != other[name]]:
            return step, names
    return None


def difference_text(step: int, names: Sequence[str]) -> str:
    """What `first_difference` has found, as a sentence without a full stop."""
    parameters = [name for name in names if not name.startswith(_LOGICAL)]
    turns = sorted(int(name.removeprefix(_LOGICAL)) for name in names if name.startswith(_LOGICAL))
    which = f"the gradient of {first_names(parameters, _MOST_NAMES)} differs" if parameters else "gradients differ"
    said = f"{which} first"
    if turns:
        return f"{said} at step {step}: logical {ranks(turns)} computed other gradients"
    return f"{said} at step {step}, though each logical rank computed the same: their sum differs"


def compared_gradients(before: Marks, now: Marks) -> str:
    """The gradients of two runs, as a sentence; empty where not both have logical ranks."""
    both: Mapping[int, object] = dict.fromkeys(before.keys() & now.keys())
    if not both:
        return ""
    if found := first_difference(before, now):
        return f"Not equal: {difference_text(*found)}."
    return f"Equal bit by bit: the gradients of {plural(len(both), 'step')}."
