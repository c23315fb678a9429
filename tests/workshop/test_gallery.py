"""The trainings of the gallery learn what their pages say, on two ranks, and larger ones too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from workshop.claims import NOTEBOOKS, claims_of, code_of, failing
from workshop.conftest import RUNS, demo, keep, lesson

GALLERY = sorted(f"gallery/{path.stem}" for path in NOTEBOOKS.glob("gallery/*.ipynb"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scale", [2, 1])
@pytest.mark.parametrize("name", GALLERY)
def test_it_learns(name: str, scale: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SECONDS", 600)
    notebook = lesson(name)
    (setup,) = (cell for cell in notebook.cells if re.search(r"^SCALE\b", cell.source, re.MULTILINE))
    setup.source, changed = re.subn(r"^(SCALE(?:, \w+)*) = 1\b", rf"\1 = {scale}", setup.source, flags=re.MULTILINE)
    assert changed == 1
    demo.execute(notebook, RUNS)
    assert failing(claims_of(name), code_of(name), demo.measured(notebook)) == []
    if scale == 1:
        keep(name, notebook, tmp_path)
