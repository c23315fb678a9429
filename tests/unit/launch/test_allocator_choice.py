"""Which allocator the ranks of a launch have: ours behind a shell too, and the system's when asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import subprocess, sys, torch, ring_notebook.torch as hvd
MAPS = "/proc/self/maps"
hvd.init()
tensor = torch.ones(1 << 20)
for _ in range(4):
    hvd.allreduce_(tensor)
spans = [(line, *(int(part, 16) for part in line.split()[0].split("-"))) for line in open(MAPS)]
line = next(line for line, begin, end in spans if begin <= tensor.data_ptr() < end)
look = f"print('_preload.so' in open('{MAPS}').read())"
child = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout.strip()
print(f"in ring memory: {'memfd:ring ' in line}, in a child: {child}, sum: {float(tensor.sum())}")
"""


@pytest.mark.parametrize(
    ("allocator", "shell", "expected"),
    [("ring", False, True), ("ring", True, True), ("system", False, False)],
    ids=["ring", "behind a shell", "system"],
)
def test_ranks_have(tmp_path: Path, allocator: str, shell: bool, expected: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    program = [sys.executable, str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "ring_notebook.launch.cli", "-np", "2"]
        + (["bash", "-c", " ".join(program)] if shell else program),
        env=os.environ | {"RING_ALLOCATOR": allocator},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = f"in ring memory: {expected}, in a child: False, sum: {float(1 << 20)}"
    assert done.stdout.splitlines() == [line, line]
