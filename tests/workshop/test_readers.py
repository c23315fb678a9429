"""A lesson is the same for a slow reader: nothing ends, and nothing is missed, while somebody reads."""

from __future__ import annotations

import random
import time

import pytest

from workshop.claims import NOTEBOOKS, claims_of, code_of, failing
from workshop.conftest import RUNS, demo, lesson
from workshop.test_gallery import GALLERY

NAMES = [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb")) if path.stem != "00_index"] + GALLERY


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_a_slow_reader(name: str) -> None:
    """Who reads for 1 to 20 s behind each cell; where nothing is left running meanwhile, for a twentieth of that."""
    notebook = lesson(name)
    demo.fill_in(notebook)
    runs_on = any("--background" in source for source in code_of(name))
    draw = random.Random(name)

    def read(**_: object) -> None:
        time.sleep(draw.uniform(1, 20) / (1 if runs_on else 20))

    demo.execute(notebook, RUNS, read=read)
    assert failing(claims_of(name), code_of(name), demo.measured(notebook)) == []
