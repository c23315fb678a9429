"""What a cell calls and names, read from its syntax tree without running it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ring_notebook.text.parsing import parse

_MAGICS = {"capture", "lprun", "memit", "mprun", "prun", "pyinstrument", "scalene", "snakeviz", "time", "timeit"}
"""Magics that execute Python code in their line or cell."""


class Hint(NamedTuple):
    """A line of the cell as the notebook counts it (0: no single line), and what to change there.

    Code in ``text`` is between backquotes.
    """

    line: int
    text: str


class Call(NamedTuple):
    """A call in a cell."""

    name: str
    """The last part of its dotted name: ``join`` for ``os.path.join``."""
    whole: str
    """The whole dotted name."""
    line: int
    node: ast.Call
    guarded: bool
    """Whether it is inside an ``if`` that checks the rank."""

    def has(self, *keywords: str) -> bool:
        return any(word.arg in keywords for word in self.node.keywords)

    def keyword(self, name: str) -> ast.expr | None:
        """The value that is passed as the keyword ``name``."""
        return next((word.value for word in self.node.keywords if word.arg == name), None)


@dataclass(frozen=True)
class CellCalls:
    """The calls of one cell. ``gpus``: each rank has a GPU."""

    tree: ast.Module
    gpus: bool = False

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """All calls, outer ones first."""
        return tuple(_calls(self.tree, guarded=False))

    @cached_property
    def names(self) -> frozenset[str]:
        """The last part of the name of each call."""
        return frozenset(call.name for call in self.calls)

    @cached_property
    def _targets(self) -> dict[int, str]:
        return {
            id(node.value): node.targets[0].id
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }

    def first(self, names: Collection[str]) -> Call | None:
        return next((call for call in self.calls if call.name in names), None)

    def result_of(self, call: Call | None) -> str:
        """The variable that gets the result of ``call``; empty if none does."""
        return self._targets.get(id(call.node), "") if call is not None else ""

    def returns(self, call: Call) -> bool:
        """Whether a function returns the result, so that its caller, perhaps in another cell, decides what follows."""
        returned = (node for node in ast.walk(self.tree) if isinstance(node, ast.Return))
        return any(call.node is inner for node in returned for inner in ast.walk(node))


def with_code_of_magics(tree: ast.Module) -> ast.Module:
    """The statements of a cell, then those in its magics, such as ``%%time``, which IPython turns into text."""
    return ast.Module([*tree.body, *_code_of_magics(tree)], type_ignores=[])


def _code_of_magics(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("get_ipython().run_"):
            texts = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
            if texts and texts[0] in _MAGICS:
                for below, text in enumerate(texts[1:]):
                    if texts[0] == "capture" and not below:  # its line has the name of a variable
                        continue
                    code = _parsed(text, is_line=not below)
                    ast.increment_lineno(code, node.lineno - 1 + below)
                    yield from with_code_of_magics(code).body


def _parsed(text: str, is_line: bool) -> ast.Module:
    """The statements of a magic's line, behind its options, or of its cell; none if they are no Python."""
    from IPython.core.inputtransformer2 import TransformerManager  # a script has no magics

    words = text.split(" ") if is_line else [text]
    for first in range(len(words)):
        with suppress(SyntaxError, ValueError):  # ValueError: for a zero character
            rest = " ".join(words[first:])
            empty = rest[: len(rest) - len(rest.lstrip())].count("\n")  # lines that IPython drops
            return parse("\n" * empty + TransformerManager().transform_cell(rest))
    return ast.Module([], type_ignores=[])


def names_in(tree: ast.AST) -> set[str]:
    """Every name that the source uses, and every module that it imports, such as ``os.path``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _calls(node: ast.AST, guarded: bool) -> Iterator[Call]:
    if isinstance(node, ast.Call):
        whole = ast.unparse(node.func)
        yield Call(whole.rpartition(".")[2], whole, node.lineno, node, guarded)
    if isinstance(node, ast.If):
        guarded = guarded or "rank" in ast.unparse(node.test)
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, guarded)
