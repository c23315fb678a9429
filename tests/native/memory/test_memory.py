"""What the core finds out about the machine: memory that is left, address space, cores of its own."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.programs import ran
from native.ranks import Seat, as_processes
from ring_notebook.core.native import core
from ring_notebook.errors import OutOfRingMemoryError

if TYPE_CHECKING:
    from ring_notebook import _core

MIB = 1 << 20
NO_LIMIT = 2**64 - 1


def control_group(directory: Path, limit: str, used: int, **cached: int) -> None:
    """The files of one control group."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    statistics = {"anon": used - sum(cached.values()), "file": sum(cached.values()), **cached, "slab": 4096}
    (directory / "memory.stat").write_text("".join(f"{key} {value}\n" for key, value in statistics.items()))


def test_cached_files_are_memory_that_is_left(tmp_path: Path) -> None:
    """A limit that reading a data set has filled leaves what the files take."""
    control_group(tmp_path, str(1000 * MIB), 1000 * MIB, inactive_file=500 * MIB, active_file=300 * MIB)
    assert core.control_group_left(str(tmp_path), "/") == 800 * MIB


def test_groups_of_the_memory_controller_alone(tmp_path: Path) -> None:
    """Where groups are not of the unified hierarchy, files and keys have other names."""
    job = tmp_path / "slurm" / "job_1"
    for directory, limit in ((tmp_path, 2**63 - 4096), (job.parent, 900 * MIB), (job, 2**63 - 4096)):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (directory / "memory.usage_in_bytes").write_text(f"{800 * MIB}\n")
        # Those without "total" leave out what the groups below it hold.
        statistics = f"inactive_file 0\ntotal_inactive_file {100 * MIB}\ntotal_active_file {50 * MIB}\n"
        (directory / "memory.stat").write_text(statistics)
    assert core.control_group_left(str(tmp_path), "/slurm/job_1") == 250 * MIB
    assert core.control_group_left(str(tmp_path), "/") > 1 << 60


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    """Of a group and all that it is in; one without a limit or without files limits nothing."""
    control_group(tmp_path, "max", 0)
    job = tmp_path / "batch" / "job"
    control_group(job, "max", 50 * MIB)
    assert core.control_group_left(str(tmp_path), "/batch/job") == NO_LIMIT
    control_group(tmp_path / "batch", str(300 * MIB), 100 * MIB, inactive_file=30 * MIB)
    assert core.control_group_left(str(tmp_path), "/batch/job") == 230 * MIB
    control_group(job, str(70 * MIB), 50 * MIB)
    assert core.control_group_left(str(tmp_path), "/batch/job") == 20 * MIB
    control_group(job, str(70 * MIB), 90 * MIB)  # the limit was lowered
    assert core.control_group_left(str(tmp_path), "/batch/job") == 0
    assert core.control_group_left(str(tmp_path), "/batch") == 230 * MIB
    assert core.control_group_left(str(tmp_path), "/nobody/knows") == NO_LIMIT
    assert core.control_group_left(str(tmp_path / "nothing"), "") == NO_LIMIT


def test_a_small_address_space_makes_small_arenas() -> None:
    """Of what can be addressed ring memory takes half at most, unless somebody says how large arenas are."""
    script = (
        "import os, resource, sys\n"
        "from ring_notebook.core.native import core\n"
        "memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')\n"
        "resource.setrlimit(resource.RLIMIT_AS, (memory, memory))\n"
        "ring_memory = core.RingMemory.create(0, 2)\n"
        "region = ring_memory.allocate(1 << 20)\n"
        "try: core.RingMemory.create(0, 2, memory)\n"
        "except Exception as error: print(error)\n"
    )
    done = ran([sys.executable, "-c", script])
    assert done.returncode == 0, done.stderr
    assert "Raise `ulimit -v`" in done.stdout


def test_cores_are_those_of_all_ranks_together() -> None:
    """A launcher that binds each rank to a core of its own has not left them one for all."""
    own = sorted(os.sched_getaffinity(0))
    if len(own) < 2:
        pytest.skip("NOT TESTED: this process may run on one core only")

    def body(seat: Seat) -> list[int]:
        found = []
        for generation, apart in ((1, True), (2, False)):
            os.sched_setaffinity(0, {own[seat.rank if apart else 0]})
            ring = seat.open(generation)  # all have come
            found.append(seat.ring_memory.cores)
            ring.barrier()
        return found

    assert as_processes(2, body) == [[2, 1], [2, 1]]


def pages_of(ring_memory: _core.RingMemory) -> int:
    """Bytes of ring memory that the kernel has given pages to."""
    return os.fstat(ring_memory.fd).st_blocks * 512


def test_freed_memory_goes_back_to_the_machine() -> None:
    """A rank keeps a reserve, on a machine that has plenty; the rest is there for others at once."""
    kept = 256 * MIB if core.memory_left() >= 1024 * MIB else MIB
    ring_memory = core.RingMemory.create(0, 1, 1024 * MIB)
    empty = pages_of(ring_memory)
    regions = [ring_memory.allocate(64 * MIB) for _ in range(6)]
    assert pages_of(ring_memory) == empty + 6 * 64 * MIB
    regions.clear()
    assert pages_of(ring_memory) <= empty + kept
    again = ring_memory.allocate(64 * MIB)  # of the reserve
    assert pages_of(ring_memory) <= empty + max(kept, 64 * MIB)
    del again
    ring_memory.trim()
    assert pages_of(ring_memory) <= empty + MIB


def test_small_blocks_go_back_with_their_page() -> None:
    """Blocks smaller than a page share one, which is the machine's again when the last one is freed."""
    ring_memory = core.RingMemory.create(0, 1, 64 * MIB)
    empty = pages_of(ring_memory)
    regions = [ring_memory.allocate(100) for _ in range(1000)]
    del regions[::2]
    ring_memory.trim()
    assert pages_of(ring_memory) > empty + 64 * 1000
    regions.clear()
    assert ring_memory.allocated == 0
    ring_memory.trim()
    assert pages_of(ring_memory) == empty


def test_a_forked_process_frees_nothing_of_its_parent() -> None:
    ring_memory = core.RingMemory.create(0, 1, 1024 * MIB)
    region = ring_memory.allocate(300 * MIB)
    view = memoryview(region)
    view[:3] = b"abc"
    before = pages_of(ring_memory)
    child = os.fork()
    if child == 0:
        view.release()
        del region
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pages_of(ring_memory) == before
    assert bytes(view[:3]) == b"abc"


@pytest.mark.parametrize("size", [2**63, 2**64 - MIB, 2**64 - 4096, 2**64 - 1])
def test_a_size_near_the_end_of_numbers_is_refused(size: int) -> None:
    """And later blocks lie beside each other in the arena."""
    ring_memory = core.RingMemory.create(0, 1, 64 * MIB)
    first = ring_memory.allocate(4096)
    with pytest.raises(OutOfRingMemoryError, match="in one piece"):
        ring_memory.allocate(size)
    blocks = [ring_memory.allocate(MIB) for _ in range(60)]
    places = [first.address, *sorted(block.address for block in blocks), first.address + 64 * MIB]
    assert places == sorted(places)
    assert min(later - before for before, later in pairwise(places[1:])) >= MIB
