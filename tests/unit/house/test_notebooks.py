"""Every notebook of the workshop has the parts that readers, and the programs that run it, expect."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
INDEX = "00_index"
PLACES = (
    "https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name}.ipynb",
    "https://kaggle.com/kernels/welcome?src=https://github.com/{repository}/blob/main/notebooks/{name}.ipynb",
    "https://mybinder.org/v2/gh/{repository}/main?labpath=notebooks/{name}.ipynb",
)
INSTALL = """\
import importlib.util

if importlib.util.find_spec("ring_notebook") is None:  # on Colab and Kaggle
    %pip install -q "ring-notebook[demo]"
%load_ext ring_notebook
"""
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def cells(name: str) -> list[dict[str, Any]]:
    found = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in found]


@pytest.mark.parametrize("name", NAMES)
def test_it_opens_elsewhere(name: str) -> None:
    title = cells(name)[0]["source"]
    links = [place.format(repository="ring-notebook/ring-notebook", name=name) for place in PLACES]
    assert [link for link in links if f"({link})" not in title] == []


def test_the_index_lists_all() -> None:
    text = "\n".join(cell["source"] for cell in cells(INDEX))
    assert [*re.findall(r"\]\((\w+)\.ipynb\)", text)] == [name for name in NAMES if name != INDEX]


@pytest.mark.parametrize("name", sorted({*NAMES} - {INDEX}))
def test_its_parts(name: str) -> None:
    parts = cells(name)
    code = [cell for cell in parts if cell["cell_type"] == "code"]
    assert code[0]["source"].startswith(INSTALL.strip())
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    tags = [tag for cell in code for tag in cell["metadata"].get("tags", ()) if tag != "raises-exception"]
    exercises = len(tags) // 2
    assert exercises
    assert tags == [*["exercise", "check"] * exercises, "measured"]
    assert all("..." in cell["source"] for cell in code if "exercise" in cell["metadata"].get("tags", ()))
    text = "\n".join(cell["source"] for cell in parts if cell["cell_type"] == "markdown")
    assert text.count("<summary>Solution</summary>\n\n```python\n") == exercises
    assert text.count("<details>") == text.count("</details>") == exercises + 3  # questions
    assert all(len(cell["source"].splitlines()) < 50 for cell in parts)
    assert code[-1]["source"] == "%ring stop"
