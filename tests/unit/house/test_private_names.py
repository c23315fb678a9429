"""Private names of torch and of JAX stand in one file each, whose reader looks whether this version has them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.trees import parsed

PACKAGE = Path(__file__).parents[3] / "ring_notebook"
FACE = PACKAGE / "torch"
LISTS = {"torch": PACKAGE / "torch_private.py", "jax": PACKAGE / "jax" / "jax_private.py"}
ROOTS = {"torch": {"torch"}, "jax": {"jax", "jaxlib"}}
IN_TEXT = {name: re.compile(rf"\b(?:{'|'.join(roots)})\b[\w.]*[.:]_(?!_)") for name, roots in ROOTS.items()}
# Of the standard library, and of accelerate.
OTHERS = {"_getframe", "_replace", "_reset_state"}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def uses(tree: ast.Module, name: str) -> Iterator[str]:
    """What a file imports of the private names, takes from what it has imported of the framework, or has in a text."""
    bound = set()
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] in ROOTS[name]:
                    bound.add(one.asname or one.name.split(".")[0])
                    yield from [one.name] * is_private(one.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ROOTS[name]:
            for one in node.names:
                bound.add(one.asname or one.name)
                yield from [f"{node.module}.{one.name}"] * is_private(f"{node.module}.{one.name}")
    for node in nodes:
        if isinstance(node, ast.Attribute) and bound:
            root, path = node.value, node.attr
            while isinstance(root, ast.Attribute):
                root, path = root.value, f"{root.attr}.{path}"
            yield from [path] * (isinstance(root, ast.Name) and root.id in bound and is_private(path))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and IN_TEXT[name].search(node.value):
            yield node.value


def defined(tree: ast.Module) -> Iterator[str]:
    """Names that a file gives a meaning, attributes too."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: parsed(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("name", LISTS)
def test_private_names_stand_in_one_file(name: str) -> None:
    found = {str(path): sorted(set(uses(tree, name))) for path, tree in trees().items() if path != LISTS[name]}
    assert {file: private for file, private in found.items() if private} == {}


def test_private_attributes_are_our_own() -> None:
    """An object of torch shows in no name where it is from; but its private attributes nobody here defines."""
    others = {path: tree for path, tree in trees().items() if path != LISTS["torch"]}
    ours = {name for tree in others.values() for name in defined(tree)} | OTHERS
    used = {
        (path.name, node.attr)
        for path, tree in others.items()
        if FACE in path.parents
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in ours
    }
    assert used == set()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("torch", "import torch._C"),
        ("torch", "from torch._C import x"),
        ("torch", "from torch.nn.modules.batchnorm import _BatchNorm"),
        ("torch", "import torch.distributed as dist\ndist.a._b.c()"),
        ("torch", "from torch.nn import Module\nModule._apply"),
        ("torch", "import_module('torch.distributed.rendezvous:_rendezvous_handlers')"),
        ("jax", "import jax._src.core"),
        ("jax", "from jax._src import dispatch"),
        ("jax", "import jax\njax.a._b.c()"),
        ("jax", "from jax.interpreters import mlir\nmlir._x"),
        ("jax", "import_module('jax._src.effects')"),
    ],
)
def test_a_private_name_is_noticed(name: str, text: str) -> None:
    assert [*uses(ast.parse(text), name)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("torch", "import torch\ntorch.__version__\nself._mine\nfrom torch.nn import Module as _M"),
        ("jax", "import jax\njax.__version__\nself._mine\nfrom jax import jit as _jit"),
    ],
)
def test_a_public_name_is_none(name: str, text: str) -> None:
    assert not [*uses(ast.parse(text), name)]
