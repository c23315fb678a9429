"""A lesson is the same for a slow reader: nothing ends, and nothing is missed, while somebody reads."""

from __future__ import annotations

import random
import time
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest

from workshop.claims import NOTEBOOKS, claims_of, code_of, failing
from workshop.conftest import RUNS, demo

NAMES = [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb")) if path.stem != "00_index"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_a_slow_reader(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads for 1 to 20 s behind each cell; where nothing is left running meanwhile, for a twentieth of that."""
    if name == "16_keras" and find_spec("keras") is None:
        pytest.skip(
            "needs Keras: make .tensorflow/installed, PYTHONPATH=$(echo $PWD/.tensorflow/venv/lib/*/site-packages)"
        )
    if name == "18_fine_tuning" and find_spec("trl") is None:
        pytest.skip("needs trl: make .libraries/installed, PYTHONPATH=$(echo $PWD/.libraries/venv/lib/*/site-packages)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RING_RUNS_DIR", "")  # put back what the run changes
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    demo.fill_in(notebook)
    runs_on = any("--background" in source for source in code_of(name))
    draw = random.Random(name)

    def read(**_: object) -> None:
        time.sleep(draw.uniform(1, 20) / (1 if runs_on else 20))

    demo.execute(notebook, RUNS, read=read)
    assert failing(claims_of(name), code_of(name), demo.measured(notebook)) == []
