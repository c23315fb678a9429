"""The quickstart keeps its promises on paper: six to eight cells, four changed lines, which it shows."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[3] / "notebooks" / "01_quickstart.ipynb"


@pytest.fixture(scope="module")
def notebook() -> nbformat.NotebookNode:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    return notebook


def difference(notebook: nbformat.NotebookNode) -> list[str]:
    """The lines of the difference between the script for one process and the cell."""
    source = next(cell.source for cell in notebook.cells if "```diff" in cell.source)
    return str(source).split("```diff\n")[1].split("\n```")[0].splitlines()


def sides(notebook: nbformat.NotebookNode) -> list[str]:
    """The two scripts: one process, every engine."""
    shown = difference(notebook)
    return ["\n".join(line[2:] for line in shown if not line.startswith(other)) for other in ("+ ", "- ")]


def cells(notebook: nbformat.NotebookNode) -> list[str]:
    """The cells of the ranks, without the exercise: the set-up, and the one that trains."""
    plain = [cell for cell in notebook.cells if "tags" not in cell.metadata]
    return [cell.source for cell in plain if cell.source.startswith("%%ringtrain")]


def lines(script: str) -> list[str]:
    return [line for line in script.splitlines() if line.strip()]


def test_six_to_eight_cells_each_with_its_reason(notebook: nbformat.NotebookNode) -> None:
    plain = [index for index, cell in enumerate(notebook.cells) if "tags" not in cell.metadata]  # without the exercise
    code = [index for index in plain if notebook.cells[index].cell_type == "code"]
    assert 6 <= len(code) <= 8
    assert all(notebook.cells[index - 1].cell_type == "markdown" for index in code)


def test_the_changed_script_is_the_cell_that_runs(notebook: nbformat.NotebookNode) -> None:
    setup, cell = cells(notebook)
    assert lines(sides(notebook)[1]) == lines(cell)
    assert setup.startswith("%%ringtrain --setup\n")
    assert len(cell.splitlines()) < 20, "so short that its panel is in sight"


def test_four_lines_differ(notebook: nbformat.NotebookNode) -> None:
    changed, removed = ([line for line in difference(notebook) if line.startswith(sign)] for sign in ("+ ", "- "))
    assert len(removed) <= len(changed) == 4


def test_all_tensors_are_made_on_the_device(notebook: nbformat.NotebookNode) -> None:
    for side in [*sides(notebook), *cells(notebook)]:
        assert re.findall(r"torch\.tensor\((?!.*, device=device\)$).*", side, re.MULTILINE) == []
    assert all("model.to(device)" in side for side in sides(notebook))


def test_the_script_of_one_process_is_a_whole_program(notebook: nbformat.NotebookNode) -> None:
    one, _ = sides(notebook)
    assert "ring" not in re.findall(r"\w+", one)
    compile(f"{cells(notebook)[0].partition(chr(10))[2]}\n{one}", "<one process>", "exec")
