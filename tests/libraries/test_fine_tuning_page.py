"""The cells of the page about fine-tuning, with the libraries that they import: as they stand there.

They live in an environment of their own: ``make test-libraries``.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from ring_notebook.notebook.cluster.cluster import Cluster

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="in an environment of its own: make test-libraries")
PAGE = Path(__file__).parents[2] / "docs" / "tasks" / "fine-tune.md"


def test_its_cells_run() -> None:
    cells = re.findall(r"^```python\n%%ringtrain\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(cells) == 3
    with Cluster(n=2) as cluster:
        for cell in cells:
            assert cluster.run(cell).wait().status == "ok"
