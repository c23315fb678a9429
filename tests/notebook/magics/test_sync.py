"""The notebook's own modules on the ranks: importable, brought over and reloaded when they change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook.kernel import Notebook

SAY = "%%ringtrain\nimport helpers\nfrom helpers import f\nprint(f(), helpers.Thing().name, helpers.__name__)"


@pytest.fixture(scope="module")
def notebook(notebook: Notebook) -> Iterator[Notebook]:
    """It brings modules over before each cell, for as long as this file runs."""
    yield notebook
    notebook.run("get_ipython().magics_manager.registry['RingMagics']._session.syncs = False")
    notebook.run("import pathlib, shutil\npathlib.Path('helpers.py').unlink()\nshutil.rmtree('pkg')")


@pytest.fixture
def folder(notebook: Notebook) -> Path:
    return Path(notebook.client.resources["metadata"]["path"])


def write(folder: Path, value: int) -> None:
    (folder / "helpers.py").write_text(
        f"def f():\n    return {value}\n"
        f"class Thing:\n    @property\n    def name(self):\n        return 'thing{value}'\n"
    )


def test_a_module_is_imported_and_reloaded_on_demand(notebook: Notebook, folder: Path) -> None:
    assert "No file has changed." in notebook.text("%ring sync")
    write(folder, 1)
    assert "[0-1] 1 thing1 helpers" in notebook.text(SAY)
    notebook.run("%%ringtrain\nold = f\nthing = helpers.Thing()")
    write(folder, 2)
    assert "[0-1] 1 thing1" in notebook.text("%%ringtrain\nprint(f(), thing.name)"), "not before it is asked for"
    assert "Synced 1 file (helpers.py): reloaded helpers." in notebook.text("%ring sync")
    assert "[0-1] 2 2 thing2" in notebook.text("%%ringtrain\nprint(f(), old(), thing.name)"), "old objects are new too"
    assert "No file has changed." in notebook.text("%ring sync")


def test_before_each_cell_once_it_is_turned_on(notebook: Notebook, folder: Path) -> None:
    write(folder, 3)
    assert "From now on each cell begins with `%ring sync`." in notebook.text("%ring start --sync")
    shown = notebook.text(SAY)
    assert "Synced 1 file" in shown
    assert "[0-1] 3 thing3" in shown
    assert "Synced" not in notebook.text(SAY)
    write(folder, 4)  # of the same size and in the same second, as compiled files go by
    assert "[0-1] 4 thing4" in notebook.text(SAY)
    assert "running already" in notebook.text("%ring start")
    write(folder, 5)
    assert "[0-1] 5 thing5" in notebook.text(SAY), "the line of an old cell turns nothing off"


def test_a_module_with_an_error_stops_the_cell_and_is_tried_again(notebook: Notebook, folder: Path) -> None:
    write(folder, 5)
    notebook.run(SAY)
    (folder / "helpers.py").write_text("x = 1\ny = 1 / 0\n")
    name, shown = notebook.error("%%ringtrain\nran = True")
    assert name == "ClusterError"
    assert "ranks 0-1: helpers.py, line 2: ZeroDivisionError: division by zero" in shown
    (folder / "helpers.py").write_text("x = (\n")
    assert "helpers.py, line 1: SyntaxError" in notebook.error("%%ringtrain\nran = True")[1]
    write(folder, 6)
    assert "[0-1] 6 thing6" in notebook.text(SAY)


def test_a_package_and_a_module_that_imports_another(notebook: Notebook, folder: Path) -> None:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").touch()
    (folder / "pkg" / "base.py").write_text("def g():\n    return 'old'\n")
    (folder / "pkg" / "top.py").write_text("from pkg.base import g\nNAME = g()\n")
    assert "[0-1] old" in notebook.text("%%ringtrain\nimport pkg.top\nprint(pkg.top.NAME)")
    (folder / "pkg" / "base.py").write_text("def g():\n    return 'new'\n")
    (folder / "pkg" / "top.py").write_text("from pkg.base import g\nNAME = g() + '!'\n")
    assert "[0-1] new!" in notebook.text("%%ringtrain\nprint(pkg.top.NAME)")
