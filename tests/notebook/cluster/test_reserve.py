"""A `--keep` cluster is reserved once: the next kernel of its notebook finds it, with its run, variables and set-up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness.waiting import until
from notebook.kernel import Notebook

pytestmark = pytest.mark.usefixtures("without_torch")
SETUP = "%%ringtrain --setup\nbase = 100 * ring.rank()"


def ranks(notebook: Notebook) -> list[dict[str, Any]]:
    """What `%ring status` tells of each."""
    told: list[dict[str, Any]] = json.loads(notebook.text("%ring status --json"))["ranks"]
    return told


@pytest.mark.slow
def test_the_next_kernel_finds_a_kept_cluster(tmp_path: Path) -> None:
    first = Notebook(tmp_path)
    assert first.text("%load_ext ring_notebook") == ""
    first.run("%ring start -n 2 --keep")
    first.run(SETUP)
    first.run("%%ringtrain\nepochs = 7")
    asks = "name = None\nif ring.rank() == 1:\n    name = input('Name? ')\n    breakpoint()\nring.barrier()"
    first.run(f"%%ringtrain --background --out run\n{asks}")
    first.run("import time\nwhile not run.asking: time.sleep(0.05)")
    pids = [rank["pid"] for rank in ranks(first)]
    first.close()
    second = Notebook(tmp_path)
    try:
        said = second.text("%load_ext ring_notebook")
        assert said == "A cluster of 2 engines from this folder is running: `%ring attach`.\n"
        said = second.text("%ring start -n 2 --keep")
        assert "Attached to 2 engines" in said
        assert "is in progress. rank 1 asks 'Name?': `%ring debug` answers." in said
        assert [rank["pid"] for rank in ranks(second)] == pids
        # A rank that has asked the kernel before.
        asked, printed, reply = second.talk("%ring debug", "Ada", "p name", "c")
        assert reply["status"] == "ok", reply
        assert asked == ["rank 1: Name? ", "rank 1 (Pdb) ", "rank 1 (Pdb) "]
        assert "'Ada'" in printed
        until(lambda: [rank["state"] for rank in ranks(second)] == ["idle", "idle"])
        # Its variables, and its set-up cells, for a rank that dies only now.
        os.kill(pids[1], 9)
        second.error("%%ringtrain\nring.barrier()")
        assert "Ran 1 set-up cell on rank 1" in second.text("%ring heal")
        second.run("%ring pull epochs -t 0")
        second.run("%ring pull base -t 1")
        assert second.text("print(epochs, base)") == "7 100\n"
        assert "Stopped 2 engines" in second.text("%ring stop")
    finally:
        second.close()
