"""The disk of ``.ring`` fills up while a cell trains: the notebook says so, ends the cell, and runs the next one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook.kernel import Notebook

pytestmark = pytest.mark.usefixtures("without_torch")

TRAINS = """%%ringtrain
import time
for step in range(300):
    ring.log(loss=1.0 / (step + 1), **{f"metric {n}": step * n for n in range(20)})
    print(f"step {step}", "x" * 2000)
    time.sleep(0.005)
print("trained to the end")
"""


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    """In a folder whose ``.ring`` is a disk of its own, of a megabyte."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED with a full disk: only root can mount a small one")
    disk = tmp_path / ".ring"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    monkeypatch.setenv("RING_RUNS_DIR", str(disk / "runs"))
    started = Notebook(tmp_path)
    try:
        started.run("%load_ext ring_notebook")
        started.text("%ring start -n 2")
        yield started
    finally:
        started.close()
        subprocess.run(["umount", "-l", disk], check=True)


def shown(outputs: list[dict[str, object]]) -> str:
    assert [output for output in outputs if output["output_type"] == "error"] == []
    return str(outputs)


@pytest.mark.slow  # `make test` runs test_a_full_disk_leaves_the_last_one
def test_a_cell_on_a_disk_that_fills_up(notebook: Notebook) -> None:
    said = shown(notebook.run(TRAINS))
    assert "trained to the end" in said
    assert "No space left on device" in said
    assert "newest records are in" in said, "what the disk did not take is somewhere else"
    verdict = "from ring_notebook.notebook.run.catalogue import listing\nlisting()"
    assert "ok" in notebook.text(verdict)
    again = shown(notebook.run("%%ringtrain\nprint('rank', ring.rank(), 'runs')"))
    assert "rank 0 runs" in again
    assert "rank 1 runs" in again
