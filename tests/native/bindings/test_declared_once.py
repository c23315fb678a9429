"""Element types, reductions and operations are declared once, in dtypes_and_ops.hpp: a new one is missed nowhere.

The compiler finds the places in C++ (`-Werror=switch-enum`), this test those in Python. `python docs/reference.py`
writes the enums of the stub.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from harness.programs import ran
from ring_notebook._core import DType, ReduceOp, paths

ROOT = Path(__file__).parents[3]
NATIVE = ROOT / "native"
PACKAGE = ROOT / "ring_notebook"
TYPES = NATIVE / "include" / "ring" / "base" / "dtypes_and_ops.hpp"
SWITCH = re.compile(r"\bcase (ring::)?(DType|ReduceOp|OpKind|Output)::")
# What a new declaration looks like, by the list that it goes into.
NEW = {
    "RING_NUMBERS": ' X(NewNumbers, "new numbers", false, false, 15)',
    "RING_DTYPES": ' X(NewType, "new_type", char, NewNumbers, 9, 7)',
    "RING_REDUCE_OPS": ' X(NewReduction, "new_reduction", kNoNumber, a < b ? a : b)',
    "RING_OPERATIONS": ' X(NewOperation, "new_operation", true, Whole)',
}
# Everything that is made from the lists has the new ones.
MADE = """
namespace ring {
static_assert(to_string(DType::NewType)[0] == 'n' && item_size(DType::NewType) == 1 && !is_integer(DType::NewType));
static_assert(dlpack::kByCode[15][1] == static_cast<int>(DType::NewType));
constexpr KernelTable kMade = make_table("");
static_assert(kMade.reduce[static_cast<int>(DType::NewType)][static_cast<int>(ReduceOp::Product)] != nullptr);
static_assert(kMade.reduce[static_cast<int>(DType::Int8)][static_cast<int>(ReduceOp::NewReduction)] != nullptr);
static_assert(to_string(ReduceOp::NewReduction)[0] == 'n' && reduces(OpKind::NewOperation));
}  // namespace ring
"""
FOUND = {
    ("NewReduction", "dtypes_and_ops.hpp", "is_sum"),
    ("", "paths.cpp", "an operation has no path"),
}


def compiled(types: str, folder: Path) -> str:
    """What the compiler says of the core with this dtypes_and_ops.hpp, of all files that have a table or a switch."""
    (folder / "ring" / "base").mkdir(parents=True)
    (folder / "ring" / "base" / "dtypes_and_ops.hpp").write_text(types)
    sources = [path for path in (NATIVE / "src").rglob("*.cpp") if SWITCH.search(path.read_text())]
    sources += [NATIVE / "src" / name for name in ("kernels/kernels_baseline.cpp", "collectives/paths.cpp")]
    sources.append(NATIVE / "bindings" / "dlpack.hpp")
    program = folder / "all.cpp"
    program.write_text("".join(f'#include "{path}"\n' for path in sources) + MADE)
    folders = [f"-I{path}" for path in (folder, NATIVE / "include", NATIVE / "src")]
    (options,) = re.findall(r"^add_compile_options\((.*)\)", (NATIVE / "CMakeLists.txt").read_text(), re.MULTILINE)
    command = ["c++", "-std=c++17", "-fsyntax-only", *options.split(), *folders, str(program)]
    return ran(command, env={**os.environ, "LC_ALL": "C"}).stderr


def places(errors: str) -> set[tuple[str, str, str]]:
    """The new value, file and function of each switch that lacks one; the file and text of each failed assertion."""
    found, function = set(), ""
    for line in errors.splitlines():
        if match := re.search(r"In (?:member )?function '.*?(\w+)\(|In instantiation of '.*?(\w+)\(", line):
            function = match[1] or match[2]
        if match := re.match(r".*?([\w.]+):\d+:\d+: error: enumeration value '(\w+)' not handled", line):
            found.add((match[2], match[1], function))
        elif match := re.match(r".*?([\w.]+):\d+:\d+: error: (?:static assertion failed: )?(.*)", line):
            found.add(("", match[1], match[2]))
    return found


def test_the_compiler_finds_the_places_in_the_core(tmp_path: Path) -> None:
    text = TYPES.read_text()
    for name, line in NEW.items():
        text, count = re.subn(rf"(#define {name}\(X\)(?:.*\\\n)*.*)", rf"\g<1>{line}", text)
        assert count == 1, name
    errors = compiled(text, tmp_path)
    assert places(errors) == FOUND, errors


def attributes(path: str, owner: str) -> set[str]:
    """The values of the enum ``owner`` that a file names."""
    nodes = ast.walk(ast.parse((PACKAGE / path).read_text()))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == owner}


def keys(path: str, name: str) -> set[str]:
    """The keys of a dict that a file gives this name."""
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and isinstance(node.value, ast.Dict):
            return {str(ast.literal_eval(key)) for key in node.value.keys if key is not None}
    raise AssertionError(f"{path} has no dict {name}")


def lacking(dtypes: Iterable[str], reductions: Iterable[str], operations: Iterable[str]) -> set[tuple[str, str]]:
    """The places in Python that do not know one of them. What a place leaves out on purpose stands here."""
    known = {
        # The doctor compares the types that NCCL has.
        "core/gpu_check_rank.py": (
            set(dtypes) - {name.upper() for name in re.findall(r'"(\w+)", [\w:]+, \w+, kNoNumber,', TYPES.read_text())},
            attributes("core/gpu_check_rank.py", "DType"),
        ),
        "api/basics.py": (set(reductions), attributes("api/basics.py", "ReduceOp")),
        # Graphs have no join, and their steps commit with the last sum.
        "api/foreign_calls.py": (set(operations) - {"join", "commit"}, keys("api/foreign_calls.py", "_KINDS")),
    }
    return {(place, name) for place, (wanted, found) in known.items() for name in wanted - found}


def test_the_places_in_python_are_found() -> None:
    dtypes, reductions = [one.name for one in DType], [one.name for one in ReduceOp]
    operations = [one.operation for one in paths()]
    assert lacking(dtypes, reductions, operations) == set()
    assert lacking([*dtypes, "NEW_TYPE"], [*reductions, "NEW_REDUCTION"], [*operations, "new_operation"]) == {
        ("core/gpu_check_rank.py", "NEW_TYPE"),
        ("api/basics.py", "NEW_REDUCTION"),
        ("api/foreign_calls.py", "new_operation"),
    }


@pytest.mark.parametrize("dtype", DType)
def test_every_type_has_its_name_in_torch(dtype: DType) -> None:
    torch = pytest.importorskip("torch")
    assert getattr(torch, dtype.name.lower()).itemsize == dtype.itemsize
