"""The trainings of the gallery learn what their pages are about, on two ranks."""

from __future__ import annotations

import pytest

from workshop.claims import NOTEBOOKS
from workshop.conftest import RUNS, demo, lesson

GALLERY = NOTEBOOKS / "gallery"
LEARNED = {
    "actors": lambda measured: measured["steps that the pole stands"] > 60,  # 20 before it has learned anything
    "diffusion": lambda measured: measured["loss of the last 20 steps"] < 0.4 < measured["loss of the first 20 steps"],
    "images": lambda measured: (
        measured["accuracy"] > 0.93
        and abs(measured["accuracy"] * 397 - round(measured["accuracy"] * 397)) < 1e-3  # each test picture counts once
    ),
    "tabular": lambda measured: measured["accuracy"] > 0.93 and measured["epochs"] < 60,
    "text": lambda measured: measured["loss, nats a byte"] < 2.8,  # log(256) = 5.5 before
}


def test_each_has_its_test() -> None:
    assert {path.stem for path in GALLERY.glob("*.ipynb")} == set(LEARNED)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNED)
def test_it_learns(name: str) -> None:
    notebook = lesson(f"gallery/{name}")
    demo.execute(notebook, RUNS)
    measured = demo.measured(notebook)
    assert LEARNED[name](measured), measured
