"""The registry of frameworks: what is built in, what other packages bring, and which one a cell uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ring_notebook import frameworks
from ring_notebook.config import config
from ring_notebook.errors import RingError


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    config.cache_clear()
    frameworks.frameworks.cache_clear()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch", "torch"),
        ("import torchvision.models as models", "torch"),
        ("from torch.nn import Linear", "torch"),
        ("model = torch.nn.Linear(1, 1)", "torch"),
        ("import ring_notebook.torch as hvd", "torch"),
        ("import math\nring.log(loss=1)", None),
        ("import ring_notebook", None),
    ],
)
def test_a_cell_names_its_framework(source: str, name: str | None) -> None:
    found = frameworks.named(frameworks.names_in(ast.parse(source)))
    assert (found and found.name) == name


def test_an_unknown_framework_is_an_error_that_lists_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RING_FRAMEWORK", "torhc")
    config.cache_clear()
    with pytest.raises(RingError, match="unknown framework 'torhc'; known are torch"):
        frameworks.default()


def test_an_entry_point_that_fails_to_load_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "broken-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[ring_notebook.frameworks]\nbroken = no_such_module:FRAMEWORK\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    frameworks.frameworks.cache_clear()
    with pytest.warns(UserWarning, match=r"entry point 'broken' \(no_such_module:FRAMEWORK\) failed to load"):
        assert "torch" in {known.name for known in frameworks.frameworks()}
