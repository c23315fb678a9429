"""Memory that malloc keeps: whether later requests have new pages to clear, and whether they come back at the end."""

from __future__ import annotations

import os
import resource
import sys

import pytest

from harness.programs import ran

MIB = 1 << 20
STEPS = """
import ctypes, resource, sys, threading
from ring_notebook import _core as core
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
c.malloc.argtypes, c.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
c.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def step():
    "Page faults of a step that takes 100 MiB and frees them."
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [(c.malloc(size << 20), size << 20) for size in (16, 20, 12, 36, 10, 6)]
    for block in blocks: c.memset(block[0], 1, block[1])
    for block in blocks: c.free(block[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def taken():
    with open("/proc/self/statm") as file: return int(file.read().split()[1]) * 4096 >> 20
"""
PAGES = 25600
"""Of a step."""


def run(script: str, *, limit: int | None = None, **variables: str) -> list[int]:
    """The numbers that a process of its own prints; ``limit`` is a resource of which it may have 8 GiB."""
    done = ran(
        [sys.executable, "-c", STEPS + script],
        env=os.environ | variables,
        preexec_fn=None if limit is None else lambda: resource.setrlimit(limit, (8192 * MIB, 8192 * MIB)),
    )
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


def test_a_process_that_imports_the_core_has_the_malloc_of_its_system() -> None:
    assert min(run("step(); print(step(), step())")) > PAGES / 2


def test_later_steps_have_no_new_pages_until_memory_is_given_back() -> None:
    kept, faults, before, after, again = run(
        "print(+core.keep_freed_memory()); step(); print(min(step() for _ in range(3)), taken())\n"
        "core.return_freed_memory(); print(taken(), step())"
    )
    assert kept == 1
    assert faults < PAGES / 100
    assert before - after > 90
    assert again > PAGES / 2


def test_a_thread_keeps_what_it_frees_too() -> None:
    """In heaps of its own, of 64 MiB each."""
    (faults,) = run(
        "core.keep_freed_memory(); found = []\n"
        "def work():\n  step(); found.append(min(step() for _ in range(3)))\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join(); print(*found)"
    )
    assert faults < PAGES / 100


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_a_limit_on_addresses_leaves_malloc_as_it_is(limit: int) -> None:
    """Each heap takes addresses beyond its blocks."""
    kept, faults = run("print(+core.keep_freed_memory()); step(); print(step())", limit=limit)
    assert kept == 0
    assert faults > PAGES / 2
