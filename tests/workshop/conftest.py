"""Runs notebooks of the workshop, their exercises also with blanks and wrong answers; prints what they measured."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))
import demo  # noqa: E402

Wrong = tuple[str, str, str]
"""A piece of the solution, what a wrong answer has in its place, and words of what the check says to that."""
Workshop = Callable[..., tuple[dict[str, Any], str]]
_TABLE: list[str] = []


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Execute a notebook: ``workshop(name, wrong, ...)`` with wrong answers for each exercise, in order.

    Each exercise is executed with its blanks, with the wrong answers, and with the solution. No cell fails; the check
    says "Not yet" and the words of the wrong answer, then "Right". Returns what the notebook has measured, and all text
    that it shows.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RING_RUNS_DIR", "")  # put back what the run changes

    def run(name: str, *wrong: Sequence[Wrong]) -> tuple[dict[str, Any], str]:
        notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
        words = list(_attempt(notebook, wrong))
        demo.execute(notebook, str(tmp_path / "runs"))
        for cell, expected in zip(demo.tagged(notebook, "check"), words, strict=True):
            said = _text(cell)
            assert expected in said
            assert ("Not yet" in said) == (expected != "Right")
        found = demo.measured(notebook)
        seconds = [_seconds(cell) for cell in notebook.cells if cell.cell_type == "code"]
        _TABLE.append(f"{name}: {sum(seconds):.0f} s, the slowest cell {max(seconds):.0f} s")
        _TABLE.extend(f"    {key:<60} {value}" for key, value in found.items())
        return found, "".join(_text(cell) for cell in notebook.cells)

    return run


def _attempt(notebook: NotebookNode, wrong: Sequence[Sequence[Wrong]]) -> Iterator[str]:
    """Put each exercise and its check into the notebook once for each attempt; what each check has to say."""
    exercises, checks = demo.tagged(notebook, "exercise"), demo.tagged(notebook, "check")
    for exercise, check, right, mistakes in zip(exercises, checks, demo.solutions(notebook), wrong, strict=True):
        attempts = [(exercise.source, "Not yet")]
        for piece, mistake, words in mistakes:
            assert piece in right
            attempts.append((right.replace(piece, mistake), words))
        attempts.append((right, "Right"))
        place = notebook.cells.index(exercise)
        notebook.cells.remove(exercise)
        notebook.cells.remove(check)
        for source, words in attempts:
            notebook.cells[place:place] = [tried := copy.deepcopy(exercise), copy.deepcopy(check)]
            tried.source = source
            place += 2
            yield words


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
