"""The constants of a cell: names that it gives a number, a text or a truth at its outermost level."""

from __future__ import annotations

import ast
from typing import Any

_MOST = 30


def constants(source: str) -> dict[str, Any]:
    """The constants by name, the last value of each; empty for a cell that Python alone cannot read."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return {}
    found: dict[str, Any] = {}
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                _add(found, target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            _add(found, node.target, node.value)
    return dict(list(found.items())[:_MOST])


def _add(found: dict[str, Any], target: ast.expr, value: ast.expr) -> None:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, part in zip(target.elts, value.elts, strict=True):
            _add(found, one, part)
    elif isinstance(target, ast.Name) and not target.id.startswith("_"):
        try:
            literal = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return
        if isinstance(literal, bool | int | float | str):
            found[target.id] = literal
