"""A script that knows torch.distributed alone: ringrun is torchrun for it, without an open port."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.programs import ringrun

SCRIPT = """
import os, sys
import torch.distributed as dist
import torch
assert "ring_notebook.torch" not in sys.modules
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
rank = int(os.environ["RANK"])
assert [os.environ[name] for name in names] == [str(rank), "2", str(rank), "2"]
for backend in ("ring", "gloo", "ring"):
    dist.init_process_group(backend)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, 2, backend)
    tensor = torch.tensor([1.0 + rank])
    dist.all_reduce(tensor)
    assert tensor.item() == 3
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in open(path).readlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in {
                os.readlink(f"/proc/self/fd/{fd}")[8:-1] for fd in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{fd}") and "socket:" in os.readlink(f"/proc/self/fd/{fd}")
            }:
                assert fields[1].startswith("0100007F"), f"listens at {fields[1]}"
    dist.destroy_process_group()
print("fine")
"""


@pytest.mark.slow
def test_a_script_for_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = ringrun("-np", "2", "python", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["fine", "fine"]
