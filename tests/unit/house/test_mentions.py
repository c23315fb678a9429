"""Files, folders, modules and tests exist that code, tests, Makefile and CI mention, and passages that mutants replace.

`test_docs.py` does the same for pages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.programs import ran

ROOT = Path(__file__).parents[3]
TRACKED = ran(["git", "ls-files"], cwd=ROOT, check=True).stdout.split()
SUFFIXES = (".py", ".pyi", ".cpp", ".hpp", ".sh", ".toml", ".yml", ".txt", ".ipynb")
SCRIPTS = {"Makefile", *(name for name in TRACKED if name.startswith((".ci/", ".github/", "docs/kubernetes/")))}
FOLDERS = {str(folder) for name in TRACKED for folder in Path(name).parents}
NAMES_OF_FOLDERS = {part for folder in FOLDERS for part in Path(folder).parts}
TEXTS = {
    name: (ROOT / name).read_text()
    for name in TRACKED
    if (name.endswith(SUFFIXES) or name in SCRIPTS) and (ROOT / name).exists()
}
# What these files mention is not ours.
ELSEWHERE = {
    "tests/jobs/harness/": "tests that they write themselves",
    "tests/unit/house/test_floors.py": "imports that nobody has",
    "tests/unit/house/test_mentions.py": "this file has wrong ones",
    "tests/unit/house/test_words.py": "files with words that are gone",
}
MUTANTS = {
    "tests/native/device/test_device_mutants.py": ("native/src/{}", "tests/native/device"),
    "tests/native/device/test_face_mutants.py": ("ring_notebook/{}.py", "tests/ranks/devices"),
}


def paths(text: str) -> Iterator[str]:
    """The files in a folder that is called as one of ours, and folders of code."""
    for path in re.findall(r"(?<![\w./:-])((?:[\w.-]+/)+[\w-]+\.(?:py|pyi|[ch]pp|sh|md|ipynb|toml))\b", text):
        if path.partition("/")[0] in NAMES_OF_FOLDERS:
            yield path
    yield from re.findall(r"(?<![\w./-])((?:tests|ring_notebook|native|benchmarks)(?:/\w+)+)(?![\w./*-])", text)


def names_of_tests(text: str) -> Iterator[str]:
    """``test_file.py``, ``test_file.py::test_name`` and, in code font, ``test_name``."""
    yield from re.findall(r"\btest_\w+\.py(?:::test_\w+)?", text)
    yield from re.findall(r"`(test_\w+)`", text)


def modules(text: str) -> Iterator[str]:
    """Names below ``ring_notebook``, and what is imported from them; of a pattern, what stands before its first brace
    or star."""
    yield from re.findall(r"\b(ring_notebook(?:\.[A-Za-z_]\w*)+)", text)
    for module, names in re.findall(r"\bfrom (ring_notebook[\w.]*) import (\((?:#.*|[^)#])*\)|[\w ,]+)", text):
        for name in re.findall(r"(?<!as )\b(?!as\b)\w+", re.sub("#.*", "", names)):
            yield f"{module}.{name}"


ENDS = {
    "/".join(parts[at:]) for name in (*TRACKED, *FOLDERS) for parts in [name.split("/")] for at in range(len(parts))
}
"""How files and folders of ours end."""
TESTS = {name: {*re.findall(r"\bdef (test_\w+)", text)} for name, text in TEXTS.items() if "/test_" in name}
EVERY_TEST = {*(Path(name).stem for name in TESTS), *(one for names in TESTS.values() for one in names)}


def is_a_test(name: str) -> bool:
    file, _, function = name.rpartition("::")
    if name.endswith(".py"):
        return name in ENDS
    return any(function in names for path, names in TESTS.items() if path.endswith(f"/{file}")) or (
        not file and function in EVERY_TEST
    )


def is_a_name(dotted: str) -> bool:
    """Whether it is a module, or a name that stands in one; a package may have it of a module that it imports whole."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        place = "/".join(parts[:length])
        if found := [name for name in (f"{place}.py", f"{place}.pyi", f"{place}/__init__.py") if name in TEXTS]:
            name = parts[length] if length < len(parts) else ""
            return name.startswith("__") or any(re.search(rf"\b{name}\b", text) for text in whole(found[0]))
    return dotted.replace(".", "/") in FOLDERS


def whole(module: str) -> Iterator[str]:
    """The text of a module, and of those of which it imports all names."""
    yield TEXTS[module]
    for imported in re.findall(r"^from (\S+) import \*", TEXTS[module], re.MULTILINE):
        yield from whole(f"{imported.replace('.', '/')}.py")


def lost(text: str) -> set[str]:
    """What a text mentions and we do not have."""
    found = {path for path in paths(text) if path not in ENDS}
    found |= {name for name in names_of_tests(text) if not is_a_test(name)}
    return found | {name for name in modules(text) if not is_a_name(name)}


def test_what_is_mentioned_exists() -> None:
    found = {name: sorted(lost(text)) for name, text in TEXTS.items() if not name.startswith(tuple(ELSEWHERE))}
    assert {name: gone for name, gone in found.items() if gone} == {}


@pytest.mark.parametrize("place", ELSEWHERE)
def test_what_is_left_out_exists(place: str) -> None:
    assert any(lost(text) for name, text in TEXTS.items() if name.startswith(place))


@pytest.mark.parametrize(
    "text",
    [
        "# see communicator/named_lane/named_lane.cpp",
        "pytest tests/notebook/magic",
        "pytest test_mention.py",
        '"test_mentions.py::test_what_exists"',
        "`test_what_exists` shows it",
        "-m ring_notebook.launch.client",
        "ring_notebook.errors.RingFault",
        "from ring_notebook.core import (\n    metrics as log,\n    checkpoint_place,\n)",
    ],
)
def test_what_does_not_exist_is_noticed(text: str) -> None:
    assert len(lost(text)) == 1


def test_a_user_s_file_is_not_taken_for_ours() -> None:
    assert lost("ringrun train.py; pkg/module.py; `test_loss.item()`; tests/*/requirements.txt") == set()


def mutants(file: str) -> dict[str, tuple[str, str, str, str]]:
    tree = ast.parse(TEXTS[file])
    tables = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MUTANTS"]
    return dict(ast.literal_eval(tables[0].value))


@pytest.mark.parametrize(("file", "name"), [(file, name) for file in MUTANTS for name in mutants(file)])
def test_a_mutant_replaces_one_passage_and_names_a_test(file: str, name: str) -> None:
    source, passage, replacement, test = mutants(file)[name]
    place, folder = MUTANTS[file]
    path = place.format(source.replace(".", "/") if place.endswith(".py") else source)
    assert TEXTS.get(path, "").count(passage) == 1, f"{path} has changed: a mutation names one passage of it"
    assert passage != replacement
    module, _, function = test.partition("::")
    assert not function or f"def {function}(" in TEXTS[f"{folder}/{module}"]
