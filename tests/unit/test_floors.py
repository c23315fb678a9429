"""The house of docs/architecture.md, proven by reading every import: down only, and the islands apart."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ring_notebook"
# Each room and the rooms below it that it may import. `ground` is the modules that lie in the package itself.
MAY_IMPORT = {
    "ground": {"ground"},
    "core": {"core", "ground"},
    "torch": {"torch", "core", "ground"},
    "engine": {"engine", "torch", "core", "ground"},
    "launch": {"launch", "ground"},
    "notebook": {"notebook", "launch", "ground"},
}
# The file that `run` starts inside ranks.
RANK_SIDE_OF_LAUNCH = {"ring_notebook/launch/task.py"}
# Frameworks and the only rooms that may import them. A room that is not named here imports none of them.
FRAMEWORKS = {
    "torch": {"torch"},
    "mpi4py": {"core", "engine"},
    "ipyparallel": {"engine", "notebook"},
    "ipywidgets": {"notebook"},
    "bqplot": {"notebook"},
}
FILES = sorted(PACKAGE.rglob("*.py"))
# It names every room and loads none, which test_import_weight proves.
FACE = "ring_notebook"


def modules_imported(source: str) -> Iterator[str]:
    """Every module that the source imports, wherever it does; ``from a import b`` gives a and a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the floor they come from"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str:
    """The room of a module of this package; its public face and everything beside it is ground."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "ground"


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def violations(path: str, source: str) -> list[str]:
    """What a file at ``path`` (from the repository's root) imports and may not."""
    room = room_of(path.removesuffix(".py").replace("/", "."))
    allowed = MAY_IMPORT[room] | ({"core"} if path in RANK_SIDE_OF_LAUNCH else set())
    bad = []
    for module in modules_imported(source):
        top = module.split(".")[0]
        if (top == "ring_notebook" and room_of(module) not in allowed) or room not in FRAMEWORKS.get(top, {room}):
            bad.append(f"{path} ({room}) imports {module}")
    return bad


@pytest.mark.parametrize("path", [path for path in FILES if path != PACKAGE / "__init__.py"], ids=name_of)
def test_imports_go_down_only(path: Path) -> None:
    assert violations(str(path.relative_to(ROOT)), path.read_text()) == []


def test_no_circles() -> None:
    """Of any two modules, one is above the other: imports within functions and for type checkers count too."""
    TopologicalSorter(graph({name_of(path): path.read_text() for path in FILES})).prepare()  # raises CycleError


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """The modules of this package that each of ``sources`` (module: text) imports anywhere."""
    names = set(sources) - {FACE}
    return {name: names_imported(text, names) - {name} for name, text in sources.items() if name != FACE}


def names_imported(source: str, names: set[str]) -> set[str]:
    """Those of ``names`` that the source needs; ``from a import b`` needs a.b where that is a module, and else a."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {member if member in names else str(node.module) for member in members}
    return found & names


@pytest.mark.parametrize(
    "last",
    [
        "from ring_notebook.torch.a import thing",
        "def f():\n    from ring_notebook.torch import a",
        "if TYPE_CHECKING:\n    import ring_notebook.torch.a",
    ],
)
def test_a_circle_is_noticed(last: str) -> None:
    sources = {
        "ring_notebook.torch": "from ring_notebook.torch.a import thing",
        "ring_notebook.torch.a": "from ring_notebook.torch import b",
        "ring_notebook.torch.b": "from ring_notebook.torch.c import other",
        "ring_notebook.torch.c": "import os",
    }
    TopologicalSorter(graph(sources)).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(graph(sources | {"ring_notebook.torch.c": last})).prepare()


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("ring_notebook/notebook/run.py", "from ring_notebook.core import world"),
        ("ring_notebook/notebook/run.py", "import ring_notebook.engine.runner"),
        ("ring_notebook/engine/runner.py", "from ring_notebook.notebook.run import Run"),
        ("ring_notebook/core/world.py", "def f():\n    import torch"),
        ("ring_notebook/core/world.py", "from ring_notebook import torch"),
        ("ring_notebook/launch/cli.py", "from ring_notebook.core import world"),
        ("ring_notebook/records.py", "from ring_notebook.core.buffers import Buffer"),
        ("ring_notebook/launch/run.py", "import mpi4py"),
    ],
)
def test_a_wrong_import_is_noticed(path: str, line: str) -> None:
    assert violations(path, line)


def test_every_room_is_known() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms <= set(MAY_IMPORT)
