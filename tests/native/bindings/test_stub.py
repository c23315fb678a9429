"""The types of the native core in _core.pyi: the same names, methods and parameters as in the compiled module."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import ring_notebook
from ring_notebook import _core

STUB = ast.parse((Path(ring_notebook.__file__).parent / "_core.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}
# What every class of an extension module has, and the buffer protocol, which shows no method before Python 3.12.
OWN = {"__init__", "__len__"}
UNSEEN = {"__buffer__"}


def names_of(member: ast.stmt) -> set[str]:
    """The name that a statement in the body of a class declares."""
    if isinstance(member, ast.FunctionDef):
        return {member.name} - UNSEEN
    if isinstance(member, ast.Assign):  # a value of an enum
        return {ast.unparse(member.targets[0])}
    return {member.target.id} if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name) else set()


def declared_parameters(function: ast.FunctionDef) -> list[str]:
    """Positional and keyword-only ones, in order; not self."""
    arguments = function.args
    return [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs) if argument.arg != "self"]


def compiled_parameters(function: Any) -> list[str]:
    """Those in the signature that pybind11 puts first in the docstring; not self."""
    signature = function.__doc__.splitlines()[0]
    without_defaults = re.sub(r"=\s*(<[^>]*>|\[[^]]*\]|'[^']*'|[^,)]*)", "", signature)
    names = re.findall(r"[(,]\s*(\w+):", without_defaults)
    return [name for name in names if name != "self"]


def test_the_module_has_the_names_of_the_stub() -> None:
    compiled = {name for name in vars(_core) if not name.startswith("_")}
    assert compiled == {*CLASSES, *FUNCTIONS}


@pytest.mark.parametrize("name", CLASSES)
def test_classes_have_the_members_of_the_stub(name: str) -> None:
    members = {**vars(getattr(_core, name)), **getattr(getattr(_core, name), "__members__", {})}
    compiled = {member for member in members if member in OWN or not member.startswith("_")}
    declared = set().union(*(names_of(member) for member in CLASSES[name].body))
    constructible = (
        "No constructor defined" not in (getattr(_core, name).__init__.__doc__ or "") and "__init__" in declared
    )
    assert compiled - (set() if constructible else {"__init__"}) == declared


def test_functions_have_the_parameters_of_the_stub() -> None:
    for name, function in FUNCTIONS.items():
        assert compiled_parameters(getattr(_core, name)) == declared_parameters(function), name


@pytest.mark.parametrize("name", CLASSES)
def test_methods_have_the_parameters_of_the_stub(name: str) -> None:
    for member in CLASSES[name].body:
        if not isinstance(member, ast.FunctionDef) or (
            member.decorator_list and ast.unparse(member.decorator_list[0]) == "property"
        ):
            continue
        compiled = getattr(getattr(_core, name), member.name, None)
        if member.name in UNSEEN or not (
            (compiled is not None and "self" in (compiled.__doc__ or "")) or member.decorator_list
        ):
            continue
        assert compiled_parameters(compiled) == declared_parameters(member), f"{name}.{member.name}"


@pytest.mark.parametrize(
    ("signature", "names"),
    [
        ("f(a: int, b: str = 'x, y', c: list[int] = [1, 2]) -> int", ["a", "b", "c"]),
        ("f(self: m.C, o: m.O = <m.O object at 0x1>, *, k: float = -1.0) -> None", ["o", "k"]),
        ("f() -> str", []),
    ],
)
def test_signatures_are_read(signature: str, names: list[str]) -> None:
    def function() -> None: ...

    function.__doc__ = signature
    assert compiled_parameters(function) == names
