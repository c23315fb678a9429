"""Which package a cell imports, as another thread sees it while the cell runs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.engine.cell import Cell


def test_the_outermost_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outer_package.py").write_text("import inner_package")
    (tmp_path / "inner_package.py").write_text("import asks; asks.seen.append(asks.importing())")
    monkeypatch.syspath_prepend(str(tmp_path))
    cell = Cell(
        InteractiveShell.instance(), "import outer_package\nimport asks\nasks.seen.append(asks.importing())", "r"
    )
    asks = SimpleNamespace(seen=[], importing=cell.importing)
    monkeypatch.setitem(sys.modules, "asks", asks)  # type: ignore[arg-type]
    cell.execute()
    assert asks.seen == ["outer_package", ""]
