"""Private names of JAX stand in one file, whose reader looks whether this JAX has them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "ring_notebook"
LIST = PACKAGE / "jax" / "jax_private.py"
IN_TEXT = re.compile(r"\bjax(?:lib)?[\w.]*[.:]_(?!_)")


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(tree: ast.Module) -> Iterator[str]:
    """What a file imports of JAX's private names, takes from what it has imported of JAX, or has in a text."""
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] in ("jax", "jaxlib"):
                    bound.add(one.asname or one.name.split(".")[0])
                    yield from [one.name] * is_private(one.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("jax", "jaxlib"):
            for one in node.names:
                bound.add(one.asname or one.name)
                yield from [f"{node.module}.{one.name}"] * is_private(f"{node.module}.{one.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, path = ast.unparse(node).partition(".")
            yield from [f"{root}.{path}"] * (root in bound and is_private(path))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and IN_TEXT.search(node.value):
            yield node.value


def test_private_names_stand_in_one_file() -> None:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path != LIST]
    found = {path.name: sorted(set(private_names(ast.parse(path.read_text())))) for path in files}
    assert {name: uses for name, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import jax._src.core",
        "from jax._src import dispatch",
        "import jax\njax.a._b.c()",
        "from jax.interpreters import mlir\nmlir._x",
        "import_module('jax._src.effects')",
    ],
)
def test_a_private_name_is_noticed(line: str) -> None:
    assert [*private_names(ast.parse(line))]


def test_a_public_name_is_none() -> None:
    assert not [*private_names(ast.parse("import jax\njax.__version__\nself._mine\nfrom jax import jit as _jit"))]
