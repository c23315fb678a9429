"""Runs notebooks of the workshop, their exercises also with blanks and wrong answers; prints what they measured.

With RING_KEEP_OUTPUTS what the cells of a test that passes have shown becomes what the documentation shows.
"""

from __future__ import annotations

import copy
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

from workshop.claims import NOTEBOOKS, claims_of, code_of, failing

sys.path.insert(0, str(NOTEBOOKS))
import demo

Wrong = tuple[str, str, str]
"""A piece of the solution, what a wrong answer has in its place, and words of what the check says to that."""
Workshop = Callable[..., tuple[dict[str, Any], str]]
RUNS = ".ring/runs"
_TABLE: list[str] = []
_PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note whether a test has passed, for what its fixtures do then."""
    report = yield
    if call.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RING_RUNS_DIR", "")  # put back what the run changes


def lesson(name: str) -> NotebookNode:
    """A notebook; the test is skipped where what it needs is not installed."""
    for needy, module, where in (("16_keras", "keras", ".tensorflow"), ("18_fine_tuning", "trl", ".libraries")):
        if name == needy and find_spec(module) is None:
            pytest.skip(
                f"needs {module}: make {where}/installed, PYTHONPATH=$(echo $PWD/{where}/venv/lib/*/site-packages)"
            )
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


@pytest.fixture
def workshop(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Workshop]:
    """Execute the lesson that the test is called after: ``workshop(wrong, ...)`` with wrong answers for its exercise.

    The exercise is executed with its blanks, with the wrong answers, and with the solution. No cell fails; the check
    says "Not yet" and what to fill in or the words of the wrong answer, then "Right"; and what the text says with
    numbers is so. Returns what the notebook has measured, and all text that it shows.
    """
    name = request.node.name.removeprefix("test_")
    notebook = lesson(name)

    def run(*wrong: Wrong) -> tuple[dict[str, Any], str]:
        words = _attempt(notebook, wrong)
        demo.execute(notebook, RUNS)
        for cell, expected in zip(demo.tagged(notebook, "check"), words, strict=True):
            said = _text(cell)
            assert expected in (said.lower() if expected == "fill in" else said)
            assert ("Not yet" in said) == (expected != "Right")
            assert "ellipsis" not in next((line for line in said.splitlines() if "Not yet" in line), "")
        found = demo.measured(notebook)
        seconds = [_seconds(cell) for cell in notebook.cells if cell.cell_type == "code"]
        keeps = "RING_KEEP_OUTPUTS" in os.environ  # what is kept says how long it took
        busy = os.getloadavg()[0] > 2 * len(os.sched_getaffinity(0)) and not keeps
        note = "; the machine is busy, so what the text says of this is not checked" * busy
        _TABLE.append(f"{name}: {sum(seconds):.0f} s, the slowest cell {max(seconds):.0f} s{note}")
        _TABLE.extend(f"    {key:<60} {value}" for key, value in found.items())
        assert failing(claims_of(name), code_of(name), found, None if busy else sum(seconds)) == []
        return found, "".join(_text(cell) for cell in notebook.cells)

    yield run
    if request.node.stash.get(_PASSED, False):
        keep(name, notebook, tmp_path)


def keep(name: str, notebook: NotebookNode, folder: Path) -> None:
    """With RING_KEEP_OUTPUTS, keep what the cells of a notebook have shown, executed in ``folder``."""
    if "RING_KEEP_OUTPUTS" in os.environ:
        shown = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}  # the last attempt's
        outputs = runpy.run_path(str(NOTEBOOKS.parent / "docs" / "outputs.py"))
        outputs["keep"](NOTEBOOKS / f"{name}.ipynb", [*shown.values()], folder)


def _attempt(notebook: NotebookNode, wrong: Sequence[Wrong]) -> list[str]:
    """Put the exercise and its check into the notebook once for each attempt; what each check has to say."""
    (exercise,), (check,), (right,) = (
        *(demo.tagged(notebook, tag) for tag in ("exercise", "check")),
        demo.solutions(notebook),
    )
    assert all(piece in right for piece, _, _ in wrong)
    attempts = [exercise.source, *(right.replace(piece, mistake) for piece, mistake, _ in wrong), right]
    tried = [NotebookNode({**copy.deepcopy(exercise), "source": source}) for source in attempts]
    place = notebook.cells.index(exercise)
    notebook.cells.remove(check)
    notebook.cells[place : place + 1] = [cell for one in tried for cell in (one, copy.deepcopy(check))]
    return ["fill in", *(words for _, _, words in wrong), "Right"]


def _text(cell: NotebookNode) -> str:
    return "".join(one.get("text") or one.get("data", {}).get("text/plain", "") for one in cell.get("outputs", ()))


def _seconds(cell: NotebookNode) -> float:
    began, ended = (cell.metadata.execution[name] for name in ("iopub.execute_input", "shell.execute_reply"))
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A table of what the notebooks have measured."""
    if _TABLE:
        terminalreporter.section("What the notebooks measured")
        terminalreporter.write("\n".join([*_TABLE, ""]))
