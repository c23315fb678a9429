"""`ringrun --trace-on-error`: the last operations of all ranks of a job that failed, and where they part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.programs import RINGRUN, ran

PROGRAM = """
import os, signal, sys
from ring_notebook.core import world
world.init()
ring = world.current().communicator
for step in range(3):
    ring.barrier(name="a")
    if world.current().rank == 1 and step == 1:
        if sys.argv[1] == "raise": raise ValueError("boom")
        if sys.argv[1] == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "return": break
    ring.barrier(name="b")
"""
STORIES = {
    "raise": "rank 1 never came: it raised ValueError: boom at train.py:9 after barrier 'a' at train.py:7",
    "kill": "rank 1 never came: it ended (killed by SIGKILL, not out of memory) after barrier 'a' at train.py:7",
    "return": "rank 1 never came: it ended (exit code 0) after barrier 'a' at train.py:7",
}


@pytest.mark.parametrize("how", [*STORIES, "end"])
def test_a_job_that_fails_leaves_a_trace(tmp_path: Path, how: str) -> None:
    """It says which rank never came, what it did, and what the others called; one that ends well leaves none."""
    program, trace = tmp_path / "train.py", tmp_path / "trace.json"
    program.write_text(PROGRAM)
    command = [*RINGRUN, "-np", "3", "--trace-on-error", str(trace)]
    job = ran([*command, str(program), how])
    if how == "end":
        assert job.returncode == 0, job.stderr
        assert not trace.exists()
        return
    assert job.returncode != 0
    sentence = f"{STORIES[how]}. ranks 0, 2 called barrier 'b' at train.py:12"
    if "SIGKILL, probably out of memory" in job.stderr:  # the kernel has killed a process of another test meanwhile
        sentence = sentence.replace("not out", "probably out")
    assert f"{sentence}. {trace} has the last operations of all ranks" in job.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    assert {one["pid"] for one in events} == {0, 1, 2}
    assert [(one["pid"], one["name"]) for one in events if one["cat"] == "parting"] == [(1, sentence)]
    waits = [one for one in events if one["cat"] == "waiting" and one["args"]["state"] != "done"]
    assert all(one["dur"] >= 0 for one in waits)  # failed, or pending where the supervisor has ended them
    assert {(one["pid"], one["name"], one["args"]["last to arrive"]) for one in waits} == {
        (0, "barrier 'b'", 1),
        (2, "barrier 'b'", 1),
    }
