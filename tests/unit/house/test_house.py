"""Habits of the house that a machine can check: docstrings, `__all__`."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

from harness.programs import ran
from harness.trees import parsed

ROOT = Path(__file__).parents[3]
SOURCES = sorted(
    path
    for folder in ("ring_notebook", "native", "tests", "benchmarks", "notebooks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".pyi", ".cpp", ".hpp"}
)
MODULES = [path for path in SOURCES if path.suffix == ".py"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def docstring(text: str) -> str:
    """The text that a source begins with; empty without one. The rest, of which there is much, is not parsed."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            return str(ast.literal_eval(token.string)) if token.type == tokenize.STRING else ""
    return ""


def test_every_file_states_its_duty() -> None:
    """The first line of its docstring is a sentence, or leads to a list or table."""
    duties = {name_of(path): docstring(path.read_text()) for path in MODULES}
    assert {name: duty for name, duty in duties.items() if not duty.split("\n")[0].endswith((".", ":"))} == {}


def test_all_names_what_exists() -> None:
    offenders = {}
    for path in MODULES:
        if ROOT / "ring_notebook" not in path.parents:
            continue
        tree = parsed(path.read_text())
        exported = exported_by(tree)
        if exported is None:  # faces alone have one; elsewhere an underscore says what is private
            continue
        unknown = set(exported) - names_bound(tree)
        if unknown or len(set(exported)) != len(exported):
            offenders[name_of(path)] = sorted(unknown) or ["a name stands twice"]
    assert offenders == {}


def exported_by(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def names_bound(tree: ast.Module) -> set[str]:
    """Every name that the module itself gives a meaning, for type checkers too."""
    names: set[str] = set()
    for node in ast.walk(ast.Module([part for part in tree.body if not isinstance(part, ast.FunctionDef)], [])):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names | {part.name for part in tree.body if isinstance(part, (ast.FunctionDef, ast.ClassDef))}


def test_a_name_that_does_not_exist_is_noticed() -> None:
    tree = ast.parse("from a import b\nimport c.d\nx = 1\nclass K: pass\ndef f(): y = 2")
    assert names_bound(tree) == {"b", "c", "x", "K", "f"}


def test_nothing_built_is_committed() -> None:
    tracked = ran(["git", "ls-files"], cwd=ROOT).stdout
    assert not [name for name in tracked.split() if name.endswith((".so", ".o", ".pyc"))]
