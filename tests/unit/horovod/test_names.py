"""Horovod's modules: what is in them, how they come and go, and what a missing one says."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import ring_notebook
import ring_notebook.torch as face
from harness.programs import ran
from ring_notebook.horovod.as_horovod import as_horovod, variables
from ring_notebook.horovod.names import MODULES, VERSION
from ring_notebook.launch import horovod_run
from unit.horovod.horovod_names import THEIRS, WITH_TENSORFLOW


@pytest.fixture
def horovod() -> Iterator[Any]:
    with as_horovod():
        yield importlib.import_module("horovod")


@pytest.mark.parametrize("module", THEIRS)
def test_every_name_is_there(horovod: Any, module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in THEIRS[module].split() if not hasattr(found, name)] == []


def test_the_table_has_no_module_that_is_not_compared() -> None:
    assert {module for module, names in MODULES.items() if names} == {*THEIRS, *WITH_TENSORFLOW}


def test_names_are_those_of_the_face(horovod: Any) -> None:
    hvd = importlib.import_module("horovod.torch")
    assert hvd.allreduce is face.allreduce
    assert hvd.mpi_ops.Sum is face.mpi_ops.Sum is face.Sum is hvd.mpi_ops._basics.Sum
    assert hvd.elastic.state.TorchState is face.elastic.TorchState
    assert hvd.compression.FP16Compressor is face.Compression.fp16
    assert horovod.run is horovod_run.run


def test_the_version_compares_as_horovods_and_says_whose_it_is(horovod: Any) -> None:
    assert Version("0.28.1") < Version(horovod.__version__) < Version("0.29")
    assert ring_notebook.__version__ in horovod.__version__


@pytest.mark.parametrize("code", ["import horovod.mxnet", "from horovod import spark", "import horovod.torch.x"])
def test_a_missing_module_says_what_there_is(horovod: Any, code: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'horovod\..*Ring Notebook .*has horovod.*torch"):
        exec(code)


def test_an_installed_horovod_is_hidden_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("__version__ = 'real'")
    monkeypatch.syspath_prepend(tmp_path)
    real = importlib.import_module("horovod")
    kept = {}
    for turn in range(2):
        with as_horovod():
            kept[turn] = importlib.import_module("horovod.torch")
            assert importlib.import_module("horovod").__version__ == VERSION
            with as_horovod():
                pass
            assert importlib.import_module("horovod").__version__ == VERSION, "the inner one has no end of its own"
        assert importlib.import_module("horovod") is real
    assert kept[0] is kept[1]
    del sys.modules["horovod"]


def test_without_it_there_is_no_horovod() -> None:
    with as_horovod():
        importlib.import_module("horovod.torch")
    assert not [name for name in sys.modules if name.startswith("horovod")]
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'horovod'$"):
        importlib.import_module("horovod")


def test_programs_that_get_the_variables_and_their_children_have_it(tmp_path: Path) -> None:
    """Also where a Horovod is installed, behind what a user has in PYTHONPATH himself."""
    (tmp_path / "horovod.py").write_text("__version__ = 'real'")
    (tmp_path / "program.py").write_text(
        "import horovod.common.util, os, subprocess, sys\n"
        "print(horovod.__version__, horovod.common.util.split_list([1, 2, 3], 2), flush=True)\n"
        "if 'child' not in sys.argv: subprocess.run([sys.executable, __file__, 'child'], check=True)\n"
    )
    script = tmp_path / "scripts"
    script.mkdir()
    (tmp_path / "program.py").rename(script / "program.py")
    env = {"PATH": "", **variables({"PYTHONPATH": str(tmp_path)})}
    done = ran([sys.executable, script / "program.py"], env=env)
    assert done.stdout == f"{VERSION} [[1, 2], [3]]\n" * 2, done.stderr


def test_util() -> None:
    with as_horovod():
        util = importlib.import_module("horovod.common.util")
    import os

    assert [len(part) for part in util.split_list(list(range(11)), 4)] == [3, 3, 3, 2]
    assert [n for n in range(9) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    assert util.is_iterable("x")
    assert not util.is_iterable(1)
    assert [util.is_version_greater_equal_than(one, "2.10.0") for one in ("2.9", "2.10", "2.21.1")] == [
        False,
        True,
        True,
    ]
    with pytest.raises(ValueError, match="versions must be texts"):
        util.is_version_greater_equal_than(2, "2.10.0")
    assert util.extension_available("torch")
    assert not util.gpu_available("tensorflow")
    with util.env(RING_TEST_OF_ENV="1", PATH=None):
        assert os.environ["RING_TEST_OF_ENV"] == "1"
        assert "PATH" in os.environ
    assert "RING_TEST_OF_ENV" not in os.environ
