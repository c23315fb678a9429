"""What importing the package costs: nothing heavy is loaded until it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ["torch", "ipyparallel", "ipywidgets", "bqplot", "mpi4py", "numpy", "IPython", "ring_notebook._core"]


def loaded_after(code: str) -> set[str]:
    """Which of HEAVY a fresh Python has loaded after ``code``."""
    ask = f"{code}\nimport sys; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "ring_notebook",
        "ring_notebook.config",
        "ring_notebook.errors",
        "ring_notebook.records",
        "ring_notebook.launch.cli",
        "ring_notebook.launch.rank",
    ],
)
def test_loads_nothing_heavy(module: str) -> None:
    assert loaded_after(f"import {module}") == set()


def test_the_public_names_load_on_first_use() -> None:
    assert loaded_after("import ring_notebook; ring_notebook.run") == set()
    assert "ipyparallel" in loaded_after("import ring_notebook; ring_notebook.Cluster")


def test_an_unknown_name_is_an_attribute_error() -> None:
    import ring_notebook

    with pytest.raises(AttributeError, match=r"ring_notebook.*no attribute 'nothing'"):
        _ = ring_notebook.nothing
    assert set(dir(ring_notebook)) == set(ring_notebook.__all__)


def test_rank_side_does_not_load_the_kernel_side() -> None:
    assert not loaded_after("import ring_notebook.torch") & {"ipyparallel", "ipywidgets", "bqplot"}
