"""The constants of a cell: names to which its outermost level assigns only numbers, texts and truth values.

A sweep runs a cell with other values in their places.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ring_notebook.errors import RingError
from ring_notebook.text.parsing import parse

_MOST = 30
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def constants(source: str) -> dict[str, Any]:
    """The constants by name, the last value of each; empty for a cell that is not plain Python.

    A name that the cell also computes, counts up or loops over is a variable, and left out. So is a name that begins
    at 0, False or "" and that the cell does not read: functions of other cells may count in it.
    """
    try:
        body = parse(source).body
    except SyntaxError:
        return {}
    given = [*_given(body)]
    found = {one.id: value for one, _, value in given if value is not None and not one.id.startswith("_")}
    targets = {target for target, _, _ in given}
    variables = {name.id for node in body for name in _stored(node) if name not in targets}
    names = [one for node in body for one in ast.walk(node)]
    read = {one.id for one in names if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    variables |= {name for name, literal in found.items() if not literal and name not in read}
    return dict([item for item in found.items() if item[0] not in variables][:_MOST])


def with_constants(source: str, values: Mapping[str, Any]) -> str:
    """The cell with other values for some of its constants.

    Raises RingError when the outermost level of the cell assigns one of these names no number, text, truth or None.
    """
    try:
        body = parse(source).body
    except SyntaxError:
        raise RingError(
            "a cell that runs with other values of its constants cannot have lines that begin with % or !"
        ) from None
    places = [(target.id, value) for target, value, _ in _given(body) if target.id in values]
    for name in values:
        if name not in dict(places):
            raise RingError(
                f"the cell has no constant {name!r}; write {name} = {values[name]!r} on a line of its own, "
                "with no space before it: the value there is replaced"
            )
    lines = source.encode().split(b"\n")  # as columns of the parser count bytes
    for name, value in sorted(places, key=lambda one: (one[1].lineno, one[1].col_offset), reverse=True):
        first, last, end = value.lineno - 1, (value.end_lineno or value.lineno) - 1, value.end_col_offset
        text = lines[first][: value.col_offset] + repr(values[name]).encode() + lines[last][end:]
        lines[first : last + 1] = [text, *[b""] * (last - first)]  # lines below keep their numbers
    return b"\n".join(lines).decode()


def _given(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.Name, ast.expr, bool | int | float | str | None]]:
    """The names that statements assign a number, text, truth value or None, each with the expression and its value."""
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _pairs(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from _pairs(node.target, node.value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.Name, ast.expr, bool | int | float | str | None]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, part in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, part)
    elif isinstance(target, ast.Name):
        try:
            literal = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return
        if literal is None or isinstance(literal, bool | int | float | str):
            yield target, value, literal


def _stored(node: ast.AST) -> Iterator[ast.Name]:
    """Where the cell gives a name a value; functions, classes and comprehensions have names of their own."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node
    elif isinstance(node, _FUNCTIONS):
        inner = [*ast.walk(node)]
        shared = {name for one in inner if isinstance(one, ast.Global) for name in one.names}
        stored = (one for one in inner if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
        yield from (one for one in stored if one.id in shared)
    elif not isinstance(node, _COMPREHENSIONS):
        for child in ast.iter_child_nodes(node):
            yield from _stored(child)
