"""The cells of the first page of the documentation, and of each page of a task, run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

from notebook.kernel import Notebook

DOCS = Path(__file__).parents[3] / "docs"
TASKS = sorted((DOCS / "tasks").glob("*.md"))
CELL = re.compile(r"(?:^<!-- (not run|raises): ([^\n]*) -->\n)?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WORDS = 600
"""Of a task, without its code."""
WITHOUT_CELLS = {"allocation", "foreign-starts", "login-node", "several-hosts", "sites"}
"""Their examples are lines of a shell on hosts and login nodes: `tests/hosts` and `tests/slurm` run such."""


def test_the_first_cells_train(notebook: Notebook) -> None:
    cells = [cell for _, _, cell in CELL.findall((DOCS / "index.md").read_text())]
    assert [cell.splitlines()[0].split()[0] for cell in cells] == ["%load_ext", "%%ringtrain", "%%ringtrain"]
    for cell in cells[:-1]:
        notebook.text(cell)
    notebook.text(cells[-1].replace("--plot loss", "--plot loss --out trained"))
    losses = "[row.values['loss'] for row in trained.metrics if row.rank == 0]"
    assert notebook.text(f"losses = {losses}\nlosses[-1] < 0.8 * losses[0]") == "True"


def ran(notebook: Notebook, cells: list[tuple[str, str, str]]) -> str:
    """The first cell that did not end as its page says, and how it ended; nothing when all did."""
    for how, what, cell in cells:
        if "--background" not in cell:
            cell = cell.replace("range(100_000)", "range(2)")  # a reader presses Stop
        shown = notebook.run(cell)
        errors = [one for one in shown if one["output_type"] == "error"]
        if [one["ename"] for one in errors] != ([what] if how == "raises" else []):
            return f"{cell}\n{errors}"
        if cell.startswith("!") and notebook.text("print(_exit_code)").strip() != "0":
            return f"{cell}\n{shown}"
    return ""


# One test, because of a test with parameters `make test` runs one case.
def test_the_cells_of_each_task_run(notebook: Notebook) -> None:
    wrong = {}
    for path in TASKS:
        page = CELL.findall(path.read_text())
        cells = [cell for cell in page if cell[0] != "not run"]
        fresh = page and not re.match(r"%ring (?!start|notify|runs)", page[0][2])
        assert fresh or path.stem in WITHOUT_CELLS, f"{path}: its first cell needs a cluster that a new notebook lacks"
        assert bool(cells) != (path.stem in WITHOUT_CELLS), path
        wrong[path.stem] = ran(notebook, cells)
        notebook.text("%%ringtrain\n%reset -f")
    assert {name: how for name, how in wrong.items() if how} == {}


def test_a_task_is_short() -> None:
    texts = {path.stem: re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL) for path in TASKS}
    assert {name: len(text.split()) for name, text in texts.items() if len(text.split()) > WORDS} == {}
