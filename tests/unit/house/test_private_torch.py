"""Private names of torch stand in one file, whose reader looks whether this torch has them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "ring_notebook"
FACE = PACKAGE / "torch"
LIST = PACKAGE / "torch_private.py"
IN_TEXT = re.compile(r"\btorch[\w.]*[.:]_(?!_)")
# Of the standard library, and of accelerate.
OTHERS = {"_getframe", "_replace", "_reset_state"}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def torchs(tree: ast.Module) -> Iterator[str]:
    """What a file imports of torch's private names, takes from what it has imported of torch, or has in a text."""
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] == "torch":
                    bound.add(one.asname or "torch")
                    yield from [one.name] * is_private(one.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for one in node.names:
                bound.add(one.asname or one.name)
                yield from [f"{node.module}.{one.name}"] * is_private(f"{node.module}.{one.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, path = ast.unparse(node).partition(".")
            yield from [f"{root}.{path}"] * (root in bound and is_private(path))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and IN_TEXT.search(node.value):
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
def trees(folder: Path) -> dict[str, ast.Module]:
    files = [path for path in sorted(folder.rglob("*.py")) if path != LIST]
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in files}


def test_private_names_stand_in_one_file() -> None:
    found = {name: sorted(set(torchs(tree))) for name, tree in trees(PACKAGE).items()}
    assert {name: uses for name, uses in found.items() if uses} == {}


def test_private_attributes_are_our_own() -> None:
    """An object of torch shows in no name where it is from; but its private attributes nobody here defines."""
    ours = {name for tree in trees(PACKAGE).values() for name in defined(tree)} | OTHERS
    used = {
        (file, node.attr)
        for file, tree in trees(FACE).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in ours
    }
    assert used == set()


@pytest.mark.parametrize(
    "line",
    [
        "import torch._C",
        "from torch._C import x",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch.distributed as dist\ndist.a._b.c()",
        "from torch.nn import Module\nModule._apply",
        "import_module('torch.distributed.rendezvous:_rendezvous_handlers')",
    ],
)
def test_a_private_name_is_noticed(line: str) -> None:
    assert [*torchs(ast.parse(line))]


def test_a_public_name_is_none() -> None:
    assert not [*torchs(ast.parse("import torch\ntorch.__version__\nself._mine\nfrom torch.nn import Module as _M"))]
