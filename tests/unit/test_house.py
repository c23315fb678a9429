"""Habits of the house that a machine can check: file sizes, docstrings, `__all__`."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = 400
SOURCES = sorted(
    path
    for folder in ("ring_notebook", "native", "tests", "benchmarks", "notebooks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".pyi", ".cpp", ".hpp"}
)
MODULES = [path for path in SOURCES if path.suffix == ".py"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_file_is_too_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LINES


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_file_states_its_duty(path: Path) -> None:
    duty = ast.get_docstring(ast.parse(path.read_text()))
    assert duty, "a docstring whose first sentence is the duty of the file"
    assert duty.splitlines()[0].endswith((".", ":")), duty.splitlines()[0]


@pytest.mark.parametrize("path", [p for p in MODULES if ROOT / "ring_notebook" in p.parents], ids=name_of)
def test_all_names_what_exists(path: Path) -> None:
    tree = ast.parse(path.read_text())
    exported = next(
        (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ),
        None,
    )
    if path.name in {"__init__.py", "__main__.py"} and exported is None:
        return
    assert exported is not None, "__all__ is missing"
    assert len(set(exported)) == len(exported)


def test_the_public_face_is_short() -> None:
    assert len((ROOT / "ring_notebook" / "__init__.py").read_text().splitlines()) < 50


def test_nothing_built_is_committed() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert not [name for name in tracked.split() if name.endswith((".so", ".o", ".pyc"))]
