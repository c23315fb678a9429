"""The cells of the documentation's first page train, one after the other, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

from notebook.kernel import Notebook

PAGE = Path(__file__).parents[3] / "docs" / "index.md"


def test_the_first_cells_train(notebook: Notebook) -> None:
    cells = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [cell.splitlines()[0].split()[0] for cell in cells] == ["%load_ext", "%%ringtrain", "%%ringtrain"]
    for cell in cells[:-1]:
        notebook.text(cell)
    notebook.text(cells[-1].replace("--plot loss", "--plot loss --out trained"))
    losses = "[row.values['loss'] for row in trained.metrics if row.rank == 0]"
    assert notebook.text(f"losses = {losses}\nlosses[-1] < 0.8 * losses[0]") == "True"
