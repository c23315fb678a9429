"""The clock of the machine is set while a job runs: nothing ends early or late, and a script still prints metrics."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.programs import RINGRUN, ran

pytestmark = pytest.mark.usefixtures("without_torch")
DAY = 86_400
SHIFT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec* now) {
    static int (*next)(clockid_t, struct timespec*);
    if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
    const int result = next(id, now);
    FILE* file = id == CLOCK_REALTIME && getenv("CLOCK_SHIFT") ? fopen(getenv("CLOCK_SHIFT"), "r") : NULL;
    long seconds;
    if (file && fscanf(file, "%ld", &seconds) == 1) now->tv_sec += seconds;
    if (file) fclose(file);
    return result;
}
"""
FAILS = """
import atexit, os, sys, time
from ring_notebook.api.basics import barrier, init, rank
def leave():
    before = time.time()
    with open(os.environ["CLOCK_SHIFT"] + ".new", "w") as file: file.write(sys.argv[1])
    os.rename(file.name, os.environ["CLOCK_SHIFT"])
    assert abs(time.time() - before) > 80_000
    os.write(1, b"jumped\\n")
    time.sleep(float(sys.argv[2]))
    os.write(1, b"handled\\n")
init()
barrier()
if rank() == 1:
    atexit.register(leave)
    raise ValueError("on purpose")
barrier()
"""
LOGS = """
import os, sys, time
import numpy_face as ring
ring.init()
def batches():
    for step in range(5):
        if step == 1:
            with open(os.environ["CLOCK_SHIFT"], "w") as file: file.write(sys.argv[1])
        time.sleep(1.1)
        yield [step]
for batch in ring.track(batches()): ring.log(loss=batch[0])
"""
CALLS = """
import os, sys, time
from ring_notebook.launch.run_function import run
def fail(by):
    import atexit
    from ring_notebook.rank.rank_status import rank_of_process
    shift = os.environ["CLOCK_SHIFT"]
    def leave():
        with open(shift + ".new", "w") as file: file.write(by)
        os.rename(file.name, shift)
    if rank_of_process() == 1:
        atexit.register(leave)
        raise ValueError("first")
    while not os.path.exists(shift): time.sleep(0.001)
    raise LookupError("second")
try: run(fail, (sys.argv[1],), n=2)
except Exception as error: print(repr(error))
"""
CELLS = """
import os, sys, time
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.run.notifications import notify
told = []
notify(told.append, after=1000.0, lab=False)
def until(condition):
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends, stopped.describe()
        time.sleep(0.01)
def set_clock():
    before = time.time()
    with open(os.environ["CLOCK_SHIFT"], "w") as file: file.write(sys.argv[1])
    assert abs(time.time() - before) > 80_000
with Cluster(2) as cluster:
    cell = "import time\\nring.log(loss=float('nan'))\\nrank = ring.rank(); ring.shutdown()\\n"
    stopped = cluster.run(cell + "ring.init() if rank == 0 else time.sleep(600)")
    until(lambda: len(stopped.log.statuses()) == 2)
    set_clock()
    until(lambda: stopped.log.broken() and [status.line for status in stopped.log.statuses().values()] == [4, 4])
    stopped.interrupt()
    until(lambda: stopped.done)
    assert stopped.status == "interrupted", stopped.error
    assert 0 < stopped.log.summary["seconds"] < 1000
    assert 0 < stopped.log.view().elapsed < 1000
    after = cluster.run("print(ring.allgather_object(ring.rank()))").wait()
    assert [piece.text for piece in after.log.view().output] == ["[0, 1]\\n"] * 2
assert not told
print("all is well")
"""


@pytest.fixture
def clock(tmp_path: Path) -> dict[str, str]:
    """Variables of processes whose clock a file sets."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("NOT TESTED with a clock that is set: no C compiler")
    source, library = tmp_path / "shift.c", tmp_path / "shift.so"
    source.write_text(SHIFT)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return {**os.environ, "LD_PRELOAD": str(library), "CLOCK_SHIFT": str(tmp_path / "shift")}


def ringrun(clock: dict[str, str], ranks: int, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*RINGRUN, "--no-prefix", "-np", str(ranks), "python", "-c"]
    return ran([*command, program, *arguments], env=clock)


@pytest.mark.parametrize(("shift", "seconds", "handled"), [(DAY, 1, True), (-DAY, 600, False)], ids=["on", "back"])
def test_a_failed_rank_has_its_seconds_and_no_more(
    shift: int, seconds: int, handled: bool, clock: dict[str, str]
) -> None:
    """For its exit handlers, in the first of which the clock jumps."""
    done = ringrun(clock, 2, FAILS, str(shift), str(seconds))
    assert done.returncode == 1, done.stderr
    assert done.stdout.split() == ["jumped", *["handled"] * handled], done.stderr
    assert "rank 1" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_script_prints_its_metrics_behind_a_jump(clock: dict[str, str]) -> None:
    done = ringrun(clock, 1, LOGS, str(-DAY))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") >= 4, done.stdout


def test_run_raises_what_came_first_and_not_what_the_clock_says(clock: dict[str, str]) -> None:
    """Both ranks fail by themselves; between their failures the clock is set back."""
    done = ran([sys.executable, "-c", CALLS, str(-DAY)], env=clock)
    assert done.stdout == "ValueError('first')\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("shift", [DAY, -DAY], ids=["on", "back"])
def test_a_cell_that_is_stopped_and_the_next_one(shift: int, clock: dict[str, str], tmp_path: Path) -> None:
    """One rank is stopped before it joins a generation. The run has its seconds and no notice; the next one is well."""
    done = ran([sys.executable, "-c", CELLS, str(shift)], env={**clock, "RING_RUNS_DIR": str(tmp_path / "runs")})
    assert done.stdout == "all is well\n", done.stderr
