"""Our own processes import nothing from the current folder; the user's scripts, functions and cells still do."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from harness.programs import ran

PACKAGE = Path(__file__).parents[3] / "ring_notebook"
RINGRUN = str(Path(sys.executable).with_name("ringrun"))
NAMES = ["json.py", "logging.py", "random.py", "runpy.py", "select.py", "selectors.py", "ring_notebook/__init__.py"]
TRAP = """
with open({mark!r}, "a") as mark:
    mark.write(__name__ + "\\n")
raise ImportError(__name__ + " of the current folder")
"""
OWN = "import os\nprint('own module of', os.environ.get('RANK'))\nVALUE = 5\n"
RUN = """
import helper, psutil
from ring_notebook import run

print(run(lambda: helper.VALUE, n=2), run(lambda: (__import__("helper").VALUE, psutil.VALUE), n=2, min_np=1))
"""
CLUSTER = """
from ring_notebook import Cluster

with Cluster(2) as cluster:
    run = cluster.run("import own, random, ring_notebook; value = own.VALUE + (random.random() < 1)")
    run.wait()
    print(run.status, cluster.pull("value"))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with modules that have the names of Python's and of ours, and note that they are imported."""
    folder = tmp_path / "folder"
    (folder / "ring_notebook").mkdir(parents=True)
    for name in NAMES:
        (folder / name).write_text(TRAP.format(mark=str(tmp_path / "imported")))
    (folder / "own.py").write_text(OWN)
    return folder


def imported(folder: Path) -> list[str]:
    mark = folder.parent / "imported"
    return sorted(set(mark.read_text().split())) if mark.exists() else []


def call(folder: Path, *command: str) -> str:
    done = ran(command, cwd=folder, timeout=250)
    assert (done.returncode, imported(folder)) == (0, []), done.stdout + done.stderr
    return done.stdout


def test_every_python_of_ours_is_started_so() -> None:
    started = re.compile(r"""(executable|python|self\.path), "-[cm]\"""")
    files = [path.name for path in PACKAGE.rglob("*.py") if started.search(path.read_text())]
    assert files == ["own_python.py"]


@pytest.mark.parametrize("options", [[], ["--elastic"], ["--mpi-args=-genv UNUSED 1"]], ids=["", "elastic", "mpiexec"])
def test_ringrun(options: list[str], folder: Path) -> None:
    said = call(folder, RINGRUN, *options, "-np", "2", "python", "-c", "import own")
    assert sorted(said.splitlines()) == ["[0] own module of 0", "[1] own module of 1"]


def test_a_function(folder: Path) -> None:
    """It imports what its caller does: what stands before installed packages in its path does so in the ranks."""
    for name, value in (("helper", 7), ("psutil", 9), ("calls", 0)):
        (folder.parent / f"{name}.py").write_text(f"VALUE = {value}\n" if value else RUN)
    assert call(folder, sys.executable, "../calls.py") == "[7, 7] [(7, 9), (7, 9)]\n"


@pytest.mark.slow
def test_a_cluster(folder: Path, without_torch: None) -> None:
    (folder.parent / "starts.py").write_text(CLUSTER)
    assert call(folder, sys.executable, "../starts.py") == "ok 6\n"


@pytest.mark.slow
def test_the_doctor(folder: Path) -> None:
    """Also: it finds a machine well that passes these tests."""
    said = call(folder, RINGRUN, "--doctor")
    assert "compiled, kernels for" in said
    assert "two ranks connected" in said
    assert "\nfail" not in said
