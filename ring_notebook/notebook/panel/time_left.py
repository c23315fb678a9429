"""How much of a run is done and how long it still takes, also if a tracked loop runs once per epoch."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from ring_notebook.notebook.record.cell_constants import constants
from ring_notebook.notebook.record.run_view import RunView, pass_of
from ring_notebook.text.parsing import parse

_AS_MANY = ("enumerate", "reversed", "sorted", "list", "tuple", "iter", "tqdm")
"""Functions that give as many values as their first argument has."""
_RANGES = ("range", "trange")
_OF_TQDM = (".tqdm", ".trange")
_PERHAPS = (ast.If, ast.IfExp, ast.Match, ast.FunctionDef, ast.Lambda)
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@dataclass(frozen=True)
class Progress:
    """The ``share`` done and the seconds ``left``, of the run, or of a ``part`` of it if the whole is unknown."""

    share: float | None
    left: float | None
    part: str = ""


class Passes(NamedTuple):
    """How often a cell runs its tracked loops: 0 if that is unknown, None if no other loop is around them."""

    planned: int | None
    in_turns: bool = False
    """Whether there are several, each of which runs once in each round of the loops around them."""


def progress(view: RunView, source: str) -> Progress:
    """The progress of a run. `track` reports how far the current pass is, and the cell says how many passes follow."""
    number = max((pass_of(rank.status) for rank in view.ranks if rank.status), default=0)
    planned, in_turns = passes(source)
    if view.progress is None or not number or (planned is None and number == 1):
        return Progress(view.progress, view.left)
    if not planned or number > planned or (in_turns and not all(rank.epoch[1] for rank in view.ranks)):
        return Progress(view.progress, view.left, f"pass {number}")
    if in_turns:  # a pass of one loop says nothing about those of others: a round takes as long as the one before
        rounds = [(pass_of(rank.status) - 1, *rank.epoch) for rank in view.ranks if rank.status]
        done = min(before + min(1.0, since / last) for before, since, last in rounds)
        left = max(max(0.0, (planned - before) * last - since) for before, since, last in rounds)
        return Progress(done / planned, max(left, view.left or 0.0))
    share = (number - 1 + view.progress) / planned
    ranks = [(rank.left, *rank.progress) for rank in view.ranks]
    later = [left / (total - done) * total for left, done, total in ranks if left is not None and done < total]
    left_of_all = None if view.left is None or not later else view.left + (planned - number) * max(later)
    return Progress(share, left_of_all)


@lru_cache(16)
def passes(source: str) -> Passes:
    """How often the cell runs its tracked loops, by its text."""
    text = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())
    try:
        tree = parse(text)
    except SyntaxError:
        return Passes(None)
    known, found = constants(text), [*_around(tree, (), False)]
    if not any(loops for loops, _ in found):
        return Passes(None)
    (loops, _), several = found[0], len(found) > 1
    alike = all(others == loops and not perhaps for others, perhaps in found)
    skips = any(_may(ast.Continue, child) for loop in loops for child in ast.iter_child_nodes(loop))
    if several and (skips or not alike):
        return Passes(0, several)
    return Passes(prod(_count(loop, known) for loop in loops), several)


def _around(node: ast.AST, loops: tuple[ast.stmt, ...], perhaps: bool) -> Iterator[tuple[tuple[ast.stmt, ...], bool]]:
    """The loops around each tracked one, and whether a round of the innermost one may leave it out."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "track":
        yield loops, perhaps
    if isinstance(node, ast.For | ast.While):
        inner, inner_perhaps = (*loops, node), False
    else:
        inner, inner_perhaps = loops, perhaps or isinstance(node, _PERHAPS)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _around(child, loops, perhaps) if name == "iter" else _around(child, inner, inner_perhaps)


def _count(loop: ast.stmt, known: dict[str, object]) -> int:
    """How often the loop is executed; 0 if its text does not say."""
    if not isinstance(loop, ast.For):
        return 0
    return 0 if any(_may(ast.Break, child) for child in loop.body) else _length(loop.iter, known)


def _may(leave: type[ast.Break | ast.Continue], node: ast.AST) -> bool:
    """Whether a statement may ``leave`` the loop around it."""
    if isinstance(node, ast.For | ast.While):
        return any(_may(leave, child) for child in node.orelse)
    return isinstance(node, leave) or any(_may(leave, child) for child in ast.iter_child_nodes(node))


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
