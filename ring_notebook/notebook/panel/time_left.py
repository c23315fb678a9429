"""How much of a run is done and how long it still takes, also if a tracked loop runs once per epoch."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ring_notebook.notebook.record.cell_constants import constants
from ring_notebook.notebook.record.run_view import RankView, RunView
from ring_notebook.text.parsing import parse

_AS_MANY = ("enumerate", "reversed", "sorted", "list", "tuple", "iter", "tqdm")
"""Functions that give as many values as their first argument has."""
_RANGES = ("range", "trange")
_OF_TQDM = (".tqdm", ".trange")
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@dataclass(frozen=True)
class Progress:
    """The ``share`` done and the seconds ``left``, of the run, or of a ``part`` of it if the whole is unknown."""

    share: float | None
    left: float | None
    part: str = ""


def progress(view: RunView, source: str) -> Progress:
    """The progress of a run. `track` reports how far the current pass is, and the cell says how many passes follow."""
    number = max((_pass(rank) for rank in view.ranks), default=0)
    planned = passes(source)
    if view.progress is None or not number or (planned is None and number == 1):
        return Progress(view.progress, view.left)
    if not planned or number > planned:
        return Progress(view.progress, view.left, f"pass {number}")
    share = (number - 1 + view.progress) / planned
    ranks = [(rank.left, *rank.progress) for rank in view.ranks]
    later = [left / (total - done) * total for left, done, total in ranks if left is not None and done < total]
    left = None if view.left is None or not later else view.left + (planned - number) * max(later)
    return Progress(share, left)


def _pass(rank: RankView) -> int:
    """The number of the pass that the rank is in, from 1; 0 outside of loops, and if `track` knows the whole."""
    return int(rank.status.extra.get("pass", 0)) if rank.status else 0


@lru_cache(16)
def passes(source: str) -> int | None:
    """How often the cell runs its one tracked loop; 0 if that is unknown, None if no other loop is around it."""
    text = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())
    try:
        tree = parse(text)
    except SyntaxError:
        return None
    known = constants(text)
    found = [[_count(loop, known) for loop in loops] for loops in _around(tree, ())]
    if not any(found):
        return None
    return prod(found[0]) if len(found) == 1 else 0


def _around(node: ast.AST, loops: tuple[ast.stmt, ...]) -> Iterator[tuple[ast.stmt, ...]]:
    """The loops around each tracked one."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "track":
        yield loops
    inner = (*loops, node) if isinstance(node, ast.For | ast.While) else loops
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _around(child, loops if name == "iter" else inner)


def _count(loop: ast.stmt, known: dict[str, object]) -> int:
    """How often the loop is executed; 0 if its text does not say."""
    if not isinstance(loop, ast.For):
        return 0
    return 0 if any(map(_may_break, loop.body)) else _length(loop.iter, known)


def _may_break(node: ast.AST) -> bool:
    """Whether a statement may end the loop around it."""
    if isinstance(node, ast.For | ast.While):
        return any(map(_may_break, node.orelse))
    return isinstance(node, ast.Break) or any(map(_may_break, ast.iter_child_nodes(node)))


def _length(over: ast.expr, known: dict[str, object]) -> int:
    """How many values an expression has; 0 if its text does not say."""
    if isinstance(over, ast.List | ast.Tuple | ast.Set):
        return 0 if any(isinstance(one, ast.Starred) for one in over.elts) else len(over.elts)
    if not (isinstance(over, ast.Call) and over.args):
        return 0
    function = ast.unparse(over.func)
    if function.endswith(_OF_TQDM):
        function = function.rpartition(".")[2]
    if function in _AS_MANY:
        return _length(over.args[0], known)
    if function == "zip" and not over.keywords:
        return min(_length(one, known) for one in over.args)
    numbers = [one for one in (_number(one, known) for one in over.args) if one is not None]
    if function not in _RANGES or not len(numbers) == len(over.args) <= 3 or 0 in numbers[2:]:
        return 0
    return len(range(*numbers))


def _number(node: ast.expr, known: dict[str, object]) -> int | None:
    """The value of a sum or product of whole numbers and constants; None if the text does not say."""
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _number(node.left, known), _number(node.right, known)
        return None if left is None or right is None else _ARITHMETIC[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _number(node.operand, known)
        return None if value is None else -value
    found = known.get(node.id) if isinstance(node, ast.Name) else getattr(node, "value", None)
    return found if isinstance(found, int) else None
