"""Cells that run as a batch job of their own, as the job runs them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from harness.programs import ran

SET_UP = """
import socket
alone = ring.size()
print("set up by", alone)
"""
TRAINS = """
print(f"rank {ring.rank()} of {ring.size()}, " + ("set up" if "alone" in globals() else "alone"))
import time
while ring.rank() == 0: time.sleep(0.01)
"""


def test_options_of_cells_hold_in_the_job(tmp_path: Path) -> None:
    """The time limit, and the ranks of set-up cells; the cell itself takes all ranks and does not pause."""
    cells = [
        {"source": SET_UP, "options": {"setup": True, "n": 1}, "name": "set-up"},
        {"source": TRAINS, "options": {"n": 1, "timeout": 2.0, "pause_at": [1]}, "name": "trains"},
    ]
    (tmp_path / "cells.json").write_text(json.dumps({"n": 2, "cells": cells, "environment": {}}))
    command = [sys.executable, "-m", "ring_notebook.notebook.cluster.submitted", str(tmp_path)]
    done = ran(command, cwd=tmp_path, env={**os.environ, "RING_RUNS_DIR": str(tmp_path / "runs")})
    assert done.returncode == 1
    assert "2 s" in done.stderr, done.stderr
    runs = {json.loads(one.read_text())["name"]: one.parent for one in tmp_path.glob("runs/*/run.json")}
    printed = {name: (folder / "journal.jsonl").read_text() for name, folder in runs.items()}
    assert "set up by 1" in printed["set-up"]
    assert "rank 0 of 2, set up" in printed["trains"]
    assert "rank 1 of 2, alone" in printed["trains"]
