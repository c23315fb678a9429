"""The registry of frameworks: what is built in, what other packages bring, and which one a cell uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager

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


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("%%time\n\nring.barrier()", 3),
        ("%%time\n!ls\nring.barrier()", 3),
        ("%%time\n%%capture out\nring.barrier()", 3),
        ("%%timeit -n 1 -r 1 ring.barrier()\npass", 1),
        ("pass\n%time ring.barrier()", 2),
        ("for _ in range(2):\n    %timeit -n1 -r 1 -q ring.barrier()", 2),
        ("took = %timeit -o -n 1 ring.barrier()", 1),
        ("%prun -l 5 ring.barrier()", 1),
    ],
)
def test_the_code_in_magics_counts(source: str, line: int) -> None:
    tree = frameworks.with_code_of_magics(ast.parse(TransformerManager().transform_cell(source)))
    assert "ring" in frameworks.names_in(tree)
    assert [call.line for call in frameworks.CellCalls(tree).calls if call.whole == "ring.barrier"] == [line]


@pytest.mark.parametrize(
    "source", ["%pip install ring", "%%bash\nring", "%time ring(", "%%time\nring(", "!ring", "%time"]
)
def test_the_text_of_other_magics_is_no_code(source: str) -> None:
    tree = frameworks.with_code_of_magics(ast.parse(TransformerManager().transform_cell(source)))
    assert "ring" not in frameworks.names_in(tree)


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
