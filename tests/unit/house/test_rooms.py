"""Each room of tests has a case that `make test` runs: one whose tests are all marked slow would be empty there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from harness.few_cases import ROOMS

TESTS = Path(__file__).parents[2]
SLOW = "pytest.mark.slow"
FOLDERS = sorted({file.parent for room in ROOMS for file in (TESTS / room).rglob("test_*.py")})


def quick(source: str) -> list[str]:
    """The tests of a file of which at least one case is not marked as slow, as far as its text tells."""
    tree = ast.parse(source)
    marks = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    if any(SLOW in ast.unparse(mark) for mark in marks):
        return []
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not any(_slow(decorator) for decorator in node.decorator_list)
    ]


def _slow(decorator: ast.expr) -> bool:
    """Whether it marks a test as slow, or each case of it."""
    if not isinstance(decorator, ast.Call):
        return ast.unparse(decorator) == SLOW
    if ast.unparse(decorator.func) != "pytest.mark.parametrize" or len(decorator.args) < 2:
        return False
    cases = decorator.args[1]
    return isinstance(cases, ast.List) and all(
        isinstance(case, ast.Call)
        and any(keyword.arg == "marks" and SLOW in ast.unparse(keyword.value) for keyword in case.keywords)
        for case in cases.elts
    )


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(TESTS)))
def test_make_test_runs_a_case_of_each_room(folder: Path) -> None:
    assert [name for file in sorted(folder.glob("test_*.py")) for name in quick(file.read_text())]


@pytest.mark.parametrize(
    ("above", "found"),
    [
        ("", ["test_it"]),
        ("@pytest.mark.usefixtures('cluster')\n", ["test_it"]),
        ("@pytest.mark.slow\n", []),
        ("pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]\n", []),
        ("@pytest.mark.parametrize('n', [1, pytest.param(2, marks=pytest.mark.slow)])\n", ["test_it"]),
        ("@pytest.mark.parametrize('n', [pytest.param(2, marks=pytest.mark.slow)])\n", []),
    ],
)
def test_what_counts_as_slow(above: str, found: list[str]) -> None:
    assert quick(f"{above}def test_it(): ...\ndef helper(): ...\n") == found
