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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("allocator", "shell", "expected"),
    [
        pytest.param("ring", False, True, id="ring", marks=pytest.mark.slow),
        pytest.param("ring", True, True, id="behind a shell"),
        pytest.param("system", False, False, id="system"),
    ],
)
def test_ranks_have(tmp_path: Path, allocator: str, shell: bool, expected: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    program = [sys.executable, str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix", "-np", "2"]
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


def test_memory_at_its_limit(tmp_path: Path, forked_ranks: None) -> None:
    """Tensors that ring memory has no room for stay where they are, and are reduced as ever."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, ring_notebook.torch as hvd\n"
        "from ring_notebook.core import world\n"
        "hvd.init()\n"
        "for step in range(4):\n"
        "    tensors = [torch.full((1 << 20,), float(number)) for number in range(20)]\n"
        "    for _ in range(2):\n"
        "        hvd.grouped_allreduce_(tensors[:10])\n"
        "        for tensor in tensors: hvd.allreduce_(tensor)\n"
        "    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))\n"
        "    counts = world.prepare_host().domain.tensors()\n"
        "    assert 8 << 20 <= counts['promoted'] <= 32 << 20 and counts['used'] == 80 << 20, counts\n"
        "print('well')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix", "-np", "2", sys.executable, str(script)],
        env=os.environ | {"RING_MEMORY": str(32 << 20)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["well", "well"]), done.stderr
