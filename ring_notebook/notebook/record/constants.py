"""The constants of a cell: names to which its outermost level gives a number, a text or a truth, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

_MOST = 30
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def constants(source: str) -> dict[str, Any]:
    """The constants by name, the last value of each; empty for a cell that Python alone cannot read.

    What the cell also computes, counts up or loops over, such as ``step = 0``, is a variable and left out.
    """
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return {}
    found: dict[str, Any] = {}
    given: set[ast.expr] = set()
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                _add(found, given, target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            _add(found, given, node.target, node.value)
    variables = {name.id for node in body for name in _stored(node) if name not in given}
    return dict([item for item in found.items() if item[0] not in variables][:_MOST])


def _add(found: dict[str, Any], given: set[ast.expr], target: ast.expr, value: ast.expr) -> None:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, part in zip(target.elts, value.elts, strict=True):
            _add(found, given, one, part)
    elif isinstance(target, ast.Name) and not target.id.startswith("_"):
        try:
            literal = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return
        if isinstance(literal, bool | int | float | str):
            found[target.id] = literal
            given.add(target)


def _stored(node: ast.AST) -> Iterator[ast.Name]:
    """Where the cell gives a name a value; functions, classes and comprehensions have names of their own."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node
    elif not isinstance(node, (*_FUNCTIONS, *_COMPREHENSIONS)):
        for child in ast.iter_child_nodes(node):
            yield from _stored(child)
