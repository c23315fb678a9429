"""Which ranks keep the memory that they free: those that we start, unless the user has chosen something else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from harness.programs import ran
from harness.small_memory import small_group

SCRIPT = """
import ctypes, resource
import ring_notebook.api.basics as ring
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
c.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def faults(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = c.malloc(size)
    c.memset(block, 1, size)
    c.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
ring.init()
print("new pages" if min(faults(64 << 20) for _ in range(4)) > 4096 else "kept pages")
"""
SHORT = """
import os
from pathlib import Path
import ring_notebook.torch as ring
import torch
Path(os.environ["TEST_GROUP"]).write_text(str(os.getpid()))
def taken(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20
ring.init()
tensors = [torch.ones(8 << 20) for _ in range(20)]
end = torch.ones(2048)  # so that they are not the end of the heap
used = taken()
del tensors
kept = taken()
model = torch.nn.Linear(1, 1)
model, optimizer = ring.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(1)).backward()
if os.environ["TEST_BY"] == "a step":
    optimizer.step()
else:
    next(iter(ring.track([1])))
print(used - kept < 64, kept - taken() > 500)
"""
"""A rank that has freed 640 MiB within the limit of its control group."""
LAUNCH = ["-m", "ring_notebook.launch.cli", "--no-prefix", "-np", "2"]


@pytest.mark.parametrize(
    ("launch", "variables", "expected"),
    [
        pytest.param(LAUNCH, {}, ["kept pages"] * 2, id="ringrun"),
        pytest.param([*LAUNCH, "bash", "-c"], {}, ["kept pages"] * 2, id="behind a shell"),
        pytest.param([], {}, ["new pages"], id="no launcher"),
        pytest.param(LAUNCH, {"RING_ALLOCATOR": "system"}, ["new pages"] * 2, id="system"),
        pytest.param(LAUNCH, {"MALLOC_MMAP_THRESHOLD_": "131072"}, ["new pages"] * 2, id="variables"),
        pytest.param(LAUNCH, {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=1000"}, ["new pages"] * 2, id="tunables"),
    ],
)
def test_ranks_have(tmp_path: Path, launch: list[str], variables: dict[str, str], expected: list[str]) -> None:
    script = tmp_path / "use.py"
    script.write_text(SCRIPT)
    program = [sys.executable, str(script)]
    done = ran(
        [sys.executable, *launch, " ".join(program)]
        if "bash" in launch
        else [*([sys.executable, *launch] if launch else []), *program],
        env=os.environ | variables,
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr


@pytest.mark.slow  # `make test` runs those of ranks/test_freed_memory.py
@pytest.mark.parametrize("by", ["a step", "the next batch"])
def test_kept_memory_goes_back_where_little_is_left(tmp_path: Path, by: str) -> None:
    script = tmp_path / "short.py"
    script.write_text(SHORT)
    with small_group(1600 << 20) as group:
        done = ran(
            [sys.executable, *LAUNCH[:-1], "1", sys.executable, str(script)],
            env=os.environ | {"TEST_GROUP": str(group / "cgroup.procs"), "TEST_BY": by},
        )
    assert (done.returncode, done.stdout.splitlines()) == (0, ["True True"]), done.stderr
