"""What runs beside us or is done to us by chance: other allocators, a group whose memory is used up, torn commits."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.programs import RINGRUN, ran

ALLOCATORS = {"jemalloc": "jemalloc", "tcmalloc": "tcmalloc_minimal"}
GROUPS = Path("/sys/fs/cgroup/memory")
TRAINS = """
import os, torch
import ring_notebook.torch as ring
ring.init()
torch.manual_seed(0)
model = torch.nn.Linear(3000, 1000)
optimizer = ring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(20):
    optimizer.zero_grad()
    model(torch.ones(4, 3000)).sum().backward()
    optimizer.step()
if os.fork() == 0: os._exit(0)
os.wait()
assert ring.allreduce(ring.empty(1 << 20).fill_(1), op=ring.Sum).eq(2).all()
assert all(weights.equal(model.weight) for weights in ring.allgather_object(model.weight))
print("trained")
"""
GREEDY = """
import os, sys
import ring_notebook.torch as ring
ring.init()
if ring.rank() == 1:
    with open(f"{sys.argv[1]}/cgroup.procs", "w") as group: group.write(str(os.getpid()))
ring.barrier()
kept = []
while ring.rank() == 1: kept.append(os.urandom(1 << 24))
try: ring.barrier()
except ring.HorovodInternalError as error: print("rank 0:", error)
"""
TORN = """
import random, sys
from pathlib import Path
import torch
import ring_notebook.torch as ring
ring.init()
path = Path(sys.argv[1])
state = ring.elastic.TorchState(epoch=3, w=torch.arange(4.0))
state.keep_on_disk(path)
state.commit()
whole = path.read_bytes()
assert torch.load(path)["epoch"] == 3
flips = random.Random(1)
tried = refused = 0
for at in range(len(whole)):
    flipped = bytearray(whole)
    flipped[at] ^= 1 << flips.randrange(8)
    torn = {whole[:at], whole[:at] + bytes(len(whole) - at), bytes(flipped)} - {whole}
    tried += len(torn)
    for damaged in torn:
        path.write_bytes(damaged)
        fresh = ring.elastic.TorchState(epoch=0, w=torch.zeros(4))
        try:
            fresh.keep_on_disk(path)
        except ring.HorovodInternalError: raise
        except RuntimeError as error:
            assert "the commit" in str(error) and "remove it" in str(error), error
            assert (fresh.epoch, fresh.w.tolist()) == (0, [0.0] * 4)
            refused += 1
        try: loaded = ring.load(path)  # with the last bytes, only the checksum may be lost
        except Exception: continue
        assert (loaded["epoch"], loaded["w"].tolist()) == (3, [0.0, 1.0, 2.0, 3.0]), at
assert refused == tried
print("refused", refused)
"""
MAPPED = """
import ctypes, os
import torch
import ring_notebook.torch as ring
c = ctypes.CDLL(None)
c.mmap.restype = ctypes.c_void_p
c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
c.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
made = []
def fill():  # neighbours differ, so that they are mappings of their own
    while (page := c.mmap(None, 4096, len(made) % 2, 0x22, -1, 0)) != ctypes.c_void_p(-1).value: made.append(page)
def empty(count):
    for _ in range(min(count, len(made))): c.munmap(made.pop(), 4096)
def reduce(tensors):
    for tensor in tensors: ring.allreduce_(tensor, op=ring.Sum)
def check(tensors):
    for tensor in tensors: assert tensor.min() == tensor.max() == 2.0 * (value := int(tensor[0]) // 2) and value, tensor
def new(value): return [torch.full(((1 << 16 + k) + 9999 * value,), float(value)) for k in range(4) for _ in range(3)]
ring.init()
held = new(1)
reduce(held)
reduce([torch.ones(1 << 20) for _ in range(4)])
for step in range(2, 12):
    more = new(step)
    if ring.rank() == 1: fill()
    reduce(more)
    check(held + more)
    held = held[len(held) // 2:] + more[::2]
    del more
    empty(500)
if ring.rank() == 1: fill()
try:
    if (child := os.fork()) == 0: os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
except OSError as error: assert error.errno == 12
check(held)
ring.shutdown()
empty(500)
ring.init()
check(held)
reduce(last := [torch.full((1 << 20,), 5.0) for _ in range(4)])
check(held + last)
print("trained")
"""
ANY_NUMBER = int(Path("/proc/sys/vm/max_map_count").read_text()) > 1 << 20


def job(program: str, *arguments: str, ranks: int = 2, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [*RINGRUN, "--no-prefix", "-np", str(ranks), "python", "-c", program]
    environment = {**os.environ, **variables}
    return ran([*command, *arguments], env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALLOCATORS)
def test_another_allocator_in_place_of_malloc(name: str) -> None:
    library = ctypes.util.find_library(ALLOCATORS[name])
    if library is None:
        pytest.skip(f"NOT TESTED with {name}: lib{ALLOCATORS[name]} is not installed")
    done = job(TRAINS, LD_PRELOAD=library)
    assert (done.returncode, done.stdout.split()) == (0, ["trained"] * 2), done.stderr


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with 700 MiB."""
    path = GROUPS / f"ring-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(700 << 20))
    except OSError as error:
        pytest.skip(f"NOT TESTED with the out-of-memory killer: no control group for memory ({error.strerror})")
    yield path
    path.rmdir()


@pytest.mark.slow
def test_the_out_of_memory_killer_at_work_on_one_rank(group: Path) -> None:
    done = job(GREEDY, str(group))
    assert done.returncode == 137, done.stderr
    assert "rank 1 on" in (last := done.stderr.splitlines()[-1])
    assert "out of memory" in last


@pytest.mark.slow
def test_a_commit_torn_at_any_byte_is_refused(tmp_path: Path) -> None:
    """Cut, with zeros behind, or with a bit changed; what `ring.load` still takes has the values that went in."""
    done = job(TORN, str(tmp_path / "commit.pt"), ranks=1)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(ANY_NUMBER, reason="NOT TESTED: this system allows any number of mappings")
def test_a_rank_that_has_as_many_mappings_as_it_may() -> None:
    """`vm.max_map_count`: its tensors stay where they are, every sum is right, and nothing ends it."""
    done = job(MAPPED)
    assert (done.returncode, done.stdout.split()) == (0, ["trained"] * 2), done.stderr
