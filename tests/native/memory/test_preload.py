"""The preloaded allocator in one process: C's functions over its blocks, and how much memory it keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ring_notebook.config import config
from ring_notebook.rank.preload import ineligible, library, preloaded, unload_from_children

PRELUDE = """
import ctypes, os, random, resource, threading
from ring_notebook.core.native import core
MIB = 1 << 20
c = ctypes.CDLL(None)
for name in ("aligned_alloc", "realloc"):
    getattr(c, name).restype = ctypes.c_void_p
    getattr(c, name).argtypes = [ctypes.c_void_p if name == "realloc" else ctypes.c_size_t, ctypes.c_size_t]
c.malloc_usable_size.restype = ctypes.c_size_t
c.malloc_usable_size.argtypes = c.free.argtypes = [ctypes.c_void_p]
domain = core.Domain.create(0, 1, 1 << 30)
counts = domain.tensors
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
"""


def run(script: str, env: dict[str, str] | None = None) -> str:
    """What a script prints in a process of its own, with the allocator preloaded."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script],
        env=os.environ | (preloaded() if env is None else env),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_serves_large_blocks_once_it_is_asked_to() -> None:
    run(
        """
before = c.aligned_alloc(64, 8 * MIB)
assert domain.serve_tensors()
assert counts()["used"] == 0
block, small, odd = c.aligned_alloc(64, 8 * MIB), c.aligned_alloc(64, 200_000), c.aligned_alloc(1 << 16, MIB)
assert counts()["used"] == 8 * MIB and block % 64 == 0 and odd % (1 << 16) == 0
for address in (before, block, small, odd):
    c.free(address)
assert counts() == {"used": 0, "cached": 8 * MIB, "promoted": 0, "reserved": 8 * MIB}
assert c.aligned_alloc(64, 8 * MIB) == block
assert not core.Domain.create(0, 1, 1 << 30).serve_tensors(), "two domains share one allocator"
del counts, domain
assert core.Domain.create(0, 1, 1 << 30).serve_tensors()
"""
    )


def test_realloc_and_usable_size() -> None:
    run(
        """
domain.serve_tensors()
for size in (1 << 18, (1 << 18) + 1, 1 << 19, (1 << 19) + 1, 300_000, 99_999_999):
    block = c.aligned_alloc(64, size)
    usable = c.malloc_usable_size(block)
    assert size <= usable <= 1.0626 * size, (size, usable)
    c.free(block)
def holds(address, bytes, value):
    return ctypes.string_at(address, bytes) == value * bytes
block = c.aligned_alloc(64, MIB)
ctypes.memset(block, 7, MIB)
assert c.realloc(block, MIB - 1000) == block
block = c.realloc(block, 5 * MIB)
assert holds(block, MIB - 1000, b"\\7")
ctypes.memset(block, 8, 5 * MIB)
block = c.realloc(block, 100)
assert holds(block, 100, b"\\10") and counts()["used"] == 0
block = c.realloc(block, 100 * MIB)  # the C library's own
assert holds(block, 100, b"\\10") and counts()["used"] == 0
assert c.realloc(block, 0) is None
block = c.aligned_alloc(64, MIB)
assert c.realloc(block, 0) is None and counts()["used"] == 0
"""
    )


@pytest.mark.slow
def test_many_sizes_leave_no_more_than_was_used_at_most() -> None:
    """An engine that lives for a day: 30,000 blocks of random sizes in changing amounts."""
    run(
        """
domain.serve_tensors()
rng = random.Random(1)
held, peak, reserved, start = [], 0, [], resident()
for step in range(30_000):
    if len(held) > rng.choice((3, 10)):
        c.free(held.pop(rng.randrange(len(held))))
    size = int(2 ** rng.uniform(18, 22.5))
    held.append(c.aligned_alloc(64, size))
    if step % 10 == 0:
        ctypes.memset(held[-1], 1, size)
    now = counts()
    peak = max(peak, now["used"])
    assert now["used"] + now["cached"] <= peak * 17 / 16 + 16 * MIB, now
    if step % 10_000 == 9_999:
        reserved.append(now["reserved"])
assert resident() - start <= peak * 17 / 16 + 24 * MIB
assert reserved[2] <= 1.2 * reserved[1], reserved
for block in held:
    c.free(block)
domain.trim()
assert counts()["cached"] == 0 and resident() - start < 16 * MIB
"""
    )


def test_threads() -> None:
    run(
        """
domain.serve_tensors()
def work(seed):
    rng, held = random.Random(seed), []
    for step in range(3_000):
        size = int(2 ** rng.uniform(17, 21))
        block = c.aligned_alloc(64, size)
        ctypes.memset(block, seed, 64)
        ctypes.memset(block + size - 64, seed, 64)
        held.append((block, size))
        if len(held) > 5:
            block, size = held.pop(rng.randrange(5))
            assert ctypes.string_at(block, 64) == ctypes.string_at(block + size - 64, 64) == bytes([seed]) * 64
            c.free(block)
    for block, _ in held:
        c.free(block)
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert counts()["used"] == 0
"""
    )


def test_without_address_space_the_c_library_serves() -> None:
    out = run(
        """
resource.setrlimit(resource.RLIMIT_AS, (int(open("/proc/self/statm").read().split()[0]) * 4096 + (1 << 30),) * 2)
print(domain.serve_tensors())
assert c.aligned_alloc(64, 8 * MIB)
"""
    )
    assert out == "False\n"


def test_without_the_library_nothing_changes() -> None:
    assert run("print(domain.serve_tensors(), domain.tensors()['used'])", env={}) == "False 0\n"


def test_who_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(library())
    config.cache_clear()
    assert ineligible() == ""
    assert preloaded({"LD_PRELOAD": "/other.so /more.so"}) == {"LD_PRELOAD": f"{path}:/other.so:/more.so"}
    assert preloaded({"LD_PRELOAD": path}) == {"LD_PRELOAD": path}
    assert preloaded({"LD_PRELOAD": "/usr/lib/gcc/12/libasan.so"}) == {}
    monkeypatch.setenv("LD_PRELOAD", f"{path}:/other.so")
    unload_from_children()
    assert os.environ["LD_PRELOAD"] == "/other.so"
    monkeypatch.setenv("LD_PRELOAD", path)
    unload_from_children()
    assert "LD_PRELOAD" not in os.environ
    monkeypatch.setenv("RING_ALLOCATOR", "system")
    config.cache_clear()
    assert (ineligible(), preloaded({})) == ("RING_ALLOCATOR=system", {})
    config.cache_clear()


def test_a_path_that_cannot_be_preloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ring_notebook.rank.preload.library", lambda: tmp_path / "a b.so")
    config.cache_clear()
    assert "contains a space or a colon" in ineligible()
