"""The quickstart keeps its promises on paper: six to eight cells, four changed lines, both scripts side by side."""

from __future__ import annotations

import difflib
import html
import re
from pathlib import Path

import nbformat
import pytest

from ring_notebook.notebook.panel.hints import Lint
from ring_notebook.notebook.record.run_view import RunState

NOTEBOOK = Path(__file__).parents[3] / "notebooks" / "01_quickstart.ipynb"


@pytest.fixture(scope="module")
def notebook() -> nbformat.NotebookNode:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    return notebook


def sides(notebook: nbformat.NotebookNode) -> list[str]:
    """The two scripts of the table: one process, every engine."""
    table = next(cell.source for cell in notebook.cells if "<table>" in cell.source)
    columns = re.findall(r"<pre>(.*?)</pre>", table, re.DOTALL)
    return [html.unescape(re.sub(r"</?mark>|&nbsp;", "", column)) for column in columns]


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


def test_it_is_saved_without_outputs(notebook: nbformat.NotebookNode) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_the_right_side_is_the_cell_that_runs(notebook: nbformat.NotebookNode) -> None:
    setup, cell = cells(notebook)
    assert lines(sides(notebook)[1]) == lines(cell)
    assert setup.startswith("%%ringtrain --setup\n")
    assert len(cell.splitlines()) < 20, "so short that its panel is in sight"


def test_at_most_four_lines_differ(notebook: nbformat.NotebookNode) -> None:
    one, every = (lines(side) for side in sides(notebook))
    changed = [line for line in difflib.ndiff(one, every) if line.startswith("+ ")]
    removed = [line for line in difflib.ndiff(one, every) if line.startswith("- ")]
    assert len(removed) <= len(changed) <= 4


def test_it_gets_no_hint_where_every_rank_has_a_gpu(notebook: nbformat.NotebookNode) -> None:
    assert Lint(sides(notebook)[1].partition("\n")[2], gpus=True).hints(RunState(2, 0.0).view(1.0)) == ()


def test_all_tensors_are_made_on_the_device(notebook: nbformat.NotebookNode) -> None:
    for side in [*sides(notebook), *cells(notebook)]:
        assert re.findall(r"torch\.tensor\((?!.*, device=device\)$).*", side, re.MULTILINE) == []
    assert all("model.to(device)" in side for side in sides(notebook))


def test_the_left_side_is_a_whole_program(notebook: nbformat.NotebookNode) -> None:
    one, _ = sides(notebook)
    assert "ring" not in re.findall(r"\w+", one)
    compile(cells(notebook)[0].partition("\n")[2] + one, "<one process>", "exec")
