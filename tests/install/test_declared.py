"""Every package that is imported is declared: where it is imported at once, in what plain pip brings."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ring_notebook"
# Folders and modules that need what an extra of their name brings.
EXTRAS = ("dask", "jax", "keras", "ray", "spark", "tensorflow", "torch")
EXTRA_OF = {"notebook/lab/jupyter_tools.py": "mcp-jupyter"}
# What a run is handed over to; a line says what to install where one is not there.
HANDED_OVER = {"mlflow", "pandas", "pillow", "tensorboard", "wandb"}
MODULES = {module: [one.replace("_", "-") for one in names] for module, names in packages_distributions().items()}


def declared(extra: str = "") -> set[str]:
    """The distributions that plain pip brings, or those that an extra adds."""
    named = [re.fullmatch(r"([\w-]+).*?(?:extra == \"([\w-]+)\")?", one) for one in requires("ring-notebook") or ()]
    return {match[1].replace("_", "-") for match in named if match and (match[2] or "") == extra}


def imported(source: str, at_once: bool) -> Iterator[str]:
    """The packages of others that the source imports, with ``at_once`` those that it imports when it is imported."""
    body: list[ast.AST] = [ast.parse(source)]
    while body:
        node = body.pop()
        if isinstance(node, ast.Import):
            yield from (top for alias in node.names if is_foreign(top := alias.name.partition(".")[0]))
        elif isinstance(node, ast.ImportFrom):
            yield from (top for top in [str(node.module).partition(".")[0]] if is_foreign(top))
        elif at_once and (
            isinstance(node, ast.FunctionDef) or (isinstance(node, ast.If) and "TYPE_" in ast.unparse(node.test))
        ):
            continue
        body += ast.iter_child_nodes(node)


def is_foreign(module: str) -> bool:
    return module not in sys.stdlib_module_names and module != "ring_notebook"


def missing(files: Iterator[Path], at_once: bool, allowed: set[str]) -> dict[str, list[str]]:
    found = {
        str(path.relative_to(PACKAGE)): sorted(
            name
            for name in set(imported(path.read_text(), at_once))
            if not allowed.intersection(MODULES.get(name, [name]))
        )
        for path in files
    }
    return {path: names for path, names in found.items() if names}


def extra_of(path: Path) -> str:
    """The extra that a file needs to be imported; empty for most."""
    own = path.relative_to(PACKAGE)
    room = own.with_suffix("").parts[0]
    return EXTRA_OF.get(str(own), room if room in EXTRAS else "")


@pytest.mark.parametrize("extra", ["", *EXTRAS, *EXTRA_OF.values()])
def test_what_is_imported_at_once_comes_with_plain_pip_or_an_extra(extra: str) -> None:
    files = [path for path in PACKAGE.rglob("*.py") if extra_of(path) == extra]
    assert files
    # PyPI's names are those of the modules, but for Spark's.
    brought = declared(extra) | {"pyspark"} if extra == "spark" else declared(extra)
    assert missing(iter(files), True, declared() | (brought if extra else set())) == {}


@pytest.mark.slow
def test_what_is_imported_later_comes_with_an_extra() -> None:
    allowed = declared() | HANDED_OVER
    for extra in (*EXTRAS, *EXTRA_OF.values(), "mcp", "mpi", "yaml"):
        allowed |= declared(extra)
    assert missing(PACKAGE.rglob("*.py"), False, allowed) == {}


@pytest.mark.parametrize(
    ("source", "at_once", "names"),
    [
        ("import numpy.linalg, os", True, ["numpy"]),
        ("from torch import nn", True, ["torch"]),
        ("def f():\n    import torch", True, []),
        ("def f():\n    import torch", False, ["torch"]),
        ("class A:\n    import torch", True, ["torch"]),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy", True, []),
        ("try:\n    import torch\nexcept ImportError:\n    pass", True, ["torch"]),
    ],
)
def test_what_counts_as_an_import(source: str, at_once: bool, names: list[str]) -> None:
    assert list(imported(source, at_once)) == names


def test_a_keras_older_than_declared_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keras.py").write_text('__version__ = "2.15.0"\n')
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import ring_notebook.keras"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    oldest = next(one for one in requires("ring-notebook") or () if one.startswith("keras>=")).split(";")[0]
    needs = f"ring_notebook.keras needs Keras {oldest.removeprefix('keras>=').strip()} or newer, and this is 2.15.0"
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {needs}"), done.stderr
