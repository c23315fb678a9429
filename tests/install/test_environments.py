"""What works where only a part is installed: nothing else, plain pip, with torch; else the error names the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from install.environments import environment

PIP = Path(__file__).parents[2] / ".install" / "bin" / "python"
RINGRUN = ["-c", "import sys; from ring_notebook.launch.cli import main; sys.exit(main())"]
NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "ring_notebook")
shell.run_line_magic("ring", "start -n 2")
result = shell.run_cell("%%ringtrain\\nfrom ring_notebook.core import world\\nsize = world.current().size\\n{lines}")
result.raise_error()
shell.run_line_magic("ring", "pull size")
print("size", shell.user_ns["size"])
shell.run_line_magic("ring", "stop")
"""
TRAIN = """
import torch
model = torch.nn.Linear(2, 1)
model, optimizer = ring.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(20):
    optimizer.zero_grad()
    loss = model(torch.ones(3, 2)).square().sum(); loss.backward()
    optimizer.step(); ring.log(loss=loss)
"""
IN_OTHER_ROOMS = """
import os, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "ring_notebook")
try:
    shell.run_line_magic("ring", "start -n 2")
except Exception as error:
    print("read-only folder:", error)
os.chdir(sys.argv[1])
shell.run_line_magic("ring", "start -n 2")
shell.run_cell("%%ringtrain\\nprint('ranks', ring.allgather_object(ring.rank()))").raise_error()
mpi = shell.run_cell("%%ringtrain\\nfrom mpi4py import MPI")
print("MPI:", mpi.error_in_exec)
shell.run_line_magic("ring", "stop")
"""
WITHOUT = """
set -e
mount -t tmpfs -o ro,size=4k none /dev/shm
mount --bind "$HOME" "$HOME"
mount -o remount,bind,ro "$HOME"
exec "$@"
"""
RANK = """
import sys
from ring_notebook.api.basics import init, rank, size
from ring_notebook.api.objects import allgather_object
init()
print(allgather_object(rank()), size(), sorted(sys.modules.keys() & {"torch", "IPython", "numpy", "mpi4py"}))
"""
SOURCES = Path(__file__).parents[2] / "ring_notebook"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("plain"), "ring-notebook")


def call(python: Path, folder: Path, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([python, *arguments], cwd=folder, capture_output=True, text=True, timeout=250, check=False)
    return done.returncode, done.stdout, done.stderr


def notebook(python: Path, folder: Path, lines: str = "") -> str:
    (folder / "notebook.py").write_text(NOTEBOOK.replace("{lines}", lines.replace("\n", "\\n")))
    code, out, err = call(python, folder, "notebook.py")
    assert code == 0, out + err
    return out


def test_ringrun_needs_no_package(tmp_path: Path) -> None:
    python = environment(tmp_path / "alone", "ring-notebook", dependencies=False)
    assert call(python, tmp_path, *RINGRUN, "--no-prefix", "-np", "2", "echo", "hello") == (0, "hello\nhello\n", "")
    for name, package in (("Cluster", "cloudpickle"), ("notify", "IPython")):
        code, _, err = call(python, tmp_path, "-c", f"import ring_notebook; ring_notebook.{name}")
        assert code
        assert f"needs {package}, which is not installed: `pip install ring-notebook` brings it" in err.splitlines()[-1]


def test_ranks_need_neither_mpi_nor_a_framework(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    code, out, err = call(plain, tmp_path, *RINGRUN, "--no-prefix", "-np", "2", "python", "rank.py")
    assert (code, out) == (0, "[0, 1] 2 []\n" * 2), err
    code, out, err = call(plain, tmp_path, *RINGRUN, "--mpi-args=-v", "-np", "2", "python", "rank.py")
    assert code == 2
    assert "`pip install 'ring-notebook[mpi]'`" in err


@pytest.mark.slow
def test_a_notebook_after_plain_pip(plain: Path, tmp_path: Path) -> None:
    assert "size 2\n" in notebook(plain, tmp_path)


@pytest.mark.slow
def test_what_needs_torch_says_so(plain: Path, tmp_path: Path) -> None:
    code, _, err = call(plain, tmp_path, "-c", "import ring_notebook.torch")
    assert code
    assert err.splitlines()[-1] == (
        "ModuleNotFoundError: ring_notebook.torch needs PyTorch, which is not installed: "
        "`pip install 'ring-notebook[torch]'`"
    )
    code, out, _ = call(plain, tmp_path, *RINGRUN, "--doctor")
    assert code == 0
    assert "warn  torch      not installed" in out
    assert "ok    mpi        none: ranks find each other without it" in out


@pytest.mark.slow
def test_training_with_the_extra_torch(tmp_path: Path) -> None:
    python = environment(tmp_path / "environment", "ring-notebook[torch]")
    assert "size 2\n" in notebook(python, tmp_path, TRAIN)


def test_sources_in_front_of_what_is_installed(tmp_path: Path) -> None:
    """As after `pip install .`, in the clone: it says which folder is in the way."""
    clone, installed = tmp_path / "clone" / "ring_notebook", tmp_path / "installed" / "ring_notebook"
    for folder in (clone, installed):
        folder.parent.mkdir()
    clone.symlink_to(SOURCES)
    installed.mkdir()
    (installed / "_core.so").touch()
    program = (
        f"import sys; sys.path[:0] = {[str(clone.parent), str(installed.parent)]}; import ring_notebook.core.native"
    )
    # -S: without the finder of an editable install
    code, _, err = call(Path(sys.executable), tmp_path, "-S", "-c", program)
    assert code == 1
    said = f"Python imports the sources in {clone}, which are not compiled, before {installed}: run in another folder."
    assert err.splitlines()[-1].endswith(said)


@pytest.mark.slow
def test_a_read_only_home_with_the_notebook_and_no_shared_memory_folder(tmp_path: Path) -> None:
    """As on hosts of others: a course folder that nobody may write, a container without /dev/shm."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED in a room of others: needs root, to mount")
    home, writable = tmp_path / "home", tmp_path / "writable"
    home.mkdir()
    writable.mkdir()
    (home / "notebook.py").write_text(IN_OTHER_ROOMS)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", WITHOUT, "sh", sys.executable, "notebook.py", writable],
        cwd=home,
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "read-only folder: cannot make" in done.stdout
    assert "`%cd` into one that you can write" in done.stdout
    assert "ranks [0, 1]" in done.stdout
    assert "MPI: MPI needs /dev/shm, which cannot be written here" in done.stdout


@pytest.mark.skipif(not PIP.exists(), reason="make test-install installs with pip")
def test_what_pip_installs(tmp_path: Path) -> None:
    assert "size 2\n" in notebook(PIP, tmp_path, TRAIN)
    code, out, err = call(PIP, tmp_path, *RINGRUN, "-np", "2", "python", "-c", "import mpi4py.MPI as m; m.COMM_WORLD")
    assert (code, out) == (0, ""), err
    code, out, _ = call(PIP, tmp_path, *RINGRUN, "--doctor")
    assert code == 0, out
