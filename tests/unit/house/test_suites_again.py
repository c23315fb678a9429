"""Suites that run again over devices: no test hides another one, and what is left out by name exists."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
SUITES = sorted((TESTS / "ranks" / "devices").glob("test_*_again.py"))
TABLES = ("USUAL", "NOT_HERE", "NOT_PRETENDED")


def names(module: str) -> list[str]:
    """The tests of a module that a suite imports."""
    tree = ast.parse((TESTS / f"{module.replace('.', '/')}.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


@pytest.mark.parametrize("suite", SUITES, ids=lambda path: path.stem)
def test_each_test_is_there_once_and_each_name_is_a_test(suite: Path) -> None:
    tree = ast.parse(suite.read_text())
    starred = [
        node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and node.names[0].name == "*"
    ]
    found = Counter(name for module in starred for name in names(module))
    assert len(starred) > 2
    assert [name for name, count in found.items() if count > 1] == []
    tables = [
        node.value
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        and ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) in TABLES
    ]
    asked = {
        entry.value.split("[")[0]
        for table in tables
        for entry in getattr(table, "keys", None) or getattr(table, "elts", [])
        if isinstance(entry, ast.Constant)
    }
    assert asked, "the tables are elsewhere"
    assert asked - found.keys() == set()
