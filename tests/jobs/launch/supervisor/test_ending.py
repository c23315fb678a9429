"""How a job ends when its ranks do not do so by themselves, and what becomes of all that they print until then."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.programs import ran
from harness.waiting import LIMIT, SLEEPS, until
from ring_notebook.launch.supervisor.tagged_output import HOLD, LINGER

both = pytest.mark.parametrize("elastic", [[], ["--elastic"]], ids=["mpi", "elastic"])


@contextlib.contextmanager
def ringrun(
    *arguments: str, stopping: float = 10.0, same: float = 0.5, prefix: str = "--no-prefix"
) -> Iterator[subprocess.Popen[str]]:
    """A job whose ranks have ``stopping`` seconds to end when they are asked to. Killed if it is still there.

    Signals within ``same`` seconds are one.
    """
    code = (
        "import sys; from ring_notebook.analysis import time_limits; from ring_notebook.launch import cli; "
        f"time_limits.STOPPING = {stopping}; time_limits.SAME_SIGNAL = {same}; sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *filter(None, [prefix]), *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace") as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(
        r"""
import os, signal, sys, time
rank = int(os.environ.get("RING_RANK") or os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
def save(signum, frame):
    os.write(1, b"saving\n")
    while not os.path.exists(sys.argv[2]): time.sleep(0.01)
    os.write(1, b"saved\n")
    sys.exit()
signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[1] == "stop" else save)
os.write(1, f"begun {os.getpid()}\n".encode())
if sys.argv[1] == "stop" and rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
SLEEPS
""".replace("SLEEPS", SLEEPS)
    )
    return str(path)


def begun(job: subprocess.Popen[str], stopped: bool = False) -> None:
    """Wait for two ranks, and until one of them is stopped."""
    assert job.stdout is not None
    stats = [Path(f"/proc/{job.stdout.readline().removeprefix('begun ').strip()}/stat") for _ in range(2)]
    if stopped:
        until(lambda: "T" in [stat.read_text().split()[2] for stat in stats])


@pytest.mark.slow
@pytest.mark.parametrize(("elastic", "signum"), [([], signal.SIGINT), (["--elastic"], signal.SIGTERM)])
def test_a_stopped_rank_does_not_hold_up_the_end(elastic: list[str], signum: signal.Signals, program: str) -> None:
    """That no rank is left is proven for the whole file, by the fixture that looks for leftovers."""
    with ringrun(*elastic, "-np", "2", "python", program, "stop", stopping=3.0) as job:
        begun(job, stopped=True)
        job.send_signal(signum)
        _, said = job.communicate(timeout=LIMIT)
    assert job.returncode == 128 + signum
    assert "ringrun: waiting 2 s more for the ranks to end; Ctrl-C kills them at once" in said
    assert "ringrun: killing the ranks: they have not ended within 3 s" in said


def test_a_second_interrupt_kills(program: str) -> None:
    with ringrun("-np", "2", "python", program, "stop", stopping=10 * LIMIT) as job:
        begun(job, stopped=True)
        job.send_signal(signal.SIGINT)
        assert job.stderr is not None
        assert "Ctrl-C kills them at once" in job.stderr.readline()  # a while after it: this is not the same signal
        job.send_signal(signal.SIGINT)
        assert job.wait(LIMIT) == 130


def test_ranks_have_time_to_end(program: str, tmp_path: Path) -> None:
    """Also when the signal comes twice at once, as from a `timeout` whose group the job is in."""
    go = tmp_path / "go"
    with ringrun("-np", "2", "python", program, "save", str(go), same=LIMIT) as job:
        begun(job)
        job.send_signal(signal.SIGINT)
        assert job.stdout is not None
        assert job.stderr is not None
        assert [job.stdout.readline() for _ in range(2)] == ["saving\n"] * 2
        job.send_signal(signal.SIGINT)
        assert "s more for the ranks to end" in job.stderr.readline()
        go.touch()
        printed, said = job.communicate(timeout=LIMIT)
    assert job.returncode == 130
    assert [line for line in printed.splitlines() if "mpiexec" not in line] == ["saved"] * 2
    assert "killing" not in said


NOTED = """
import _thread, threading
from ring_notebook.launch.job import Job
job = Job(["sleep", "600"], 1)
with job.signals_passed_on():
    threading.Timer(0.5, _thread.interrupt_main).start()
    print(job.wait())
"""


def test_an_interrupt_that_python_notes_just_before_it_waits_for_the_job() -> None:
    """Nothing wakes the system call then."""
    done = ran([sys.executable, "-c", NOTED])
    assert (done.returncode, done.stdout) == (0, "130\n"), done.stderr


@pytest.mark.slow
@both
@pytest.mark.parametrize(
    "start",
    ["print(subprocess.Popen(['sleep', '100']).pid, flush=True)", "os.system('sleep 100 & echo $!')"],
    ids=["closed", "inherited"],
)
def test_what_a_rank_leaves_behind_is_not_waited_for(elastic: list[str], start: str) -> None:
    """A process that has the rank's output, or all that the rank itself has inherited."""
    with ringrun(*elastic, "-np", "2", "python", "-c", f"import os, subprocess; {start}") as job:
        printed, said = job.communicate(timeout=LIMIT)
    left = [int(line) for line in printed.splitlines()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (len(left), job.returncode, said) == (2, 0, "")


@both
def test_the_last_words_of_what_outlives_a_rank_are_heard(elastic: list[str]) -> None:
    with ringrun(*elastic, "-np", "1", "sh", "-c", "{ sleep .2; echo late; } & echo early") as job:
        assert job.communicate(timeout=LIMIT) == ("early\nlate\n", "")


@both
def test_a_rank_that_raises_ends_the_job_while_the_others_call_nothing(elastic: list[str]) -> None:
    """Its exit handlers wait for all ranks, in MPI_Finalize, and this one sleeps."""
    code = (
        "import time; from ring_notebook.api.basics import init, rank; "
        "from ring_notebook.api.basics import barrier; init(); barrier(); assert rank() == 0; time.sleep(600)"
    )
    keep_all = ["--min-np", "2"] if elastic else []
    with ringrun(*elastic, *keep_all, "-np", "2", "python", "-c", code) as job:
        _, said = job.communicate(timeout=LIMIT)
    assert job.returncode == 1
    assert "AssertionError" in said
    assert re.search(r"ringrun: rank 1 (on \S+ )?failed", said)


@both
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_lines_of_ranks_do_not_mix(elastic: list[str], stream: str, tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        "longest = 0\n"
        "for n in range(100):\n"
        " start = time.monotonic()\n"
        f" print('text', end='', file=sys.{stream}, flush=True); time.sleep(0.001); print('x' * n, file=sys.{stream})\n"
        " longest = max(longest, time.monotonic() - start)\n"
        f"with open(os.path.join({str(tmp_path)!r}, str(os.getpid())), 'w') as file: file.write(str(longest))"
    )
    for _ in range(10):
        with ringrun(*elastic, "-np", "4", "python", "-c", code, prefix="") as job:
            written = "".join(job.communicate(timeout=LIMIT))
        longest = [float(path.read_text()) for path in tmp_path.iterdir()]
        for path in tmp_path.iterdir():
            path.unlink()
        if len(longest) == 4 and max(longest) < HOLD / 2:
            break  # a rank that a busy machine stops in the middle of a line for longer has its line cut, by intent
    assert Counter(written.splitlines()) == {f"[{rank}] text{'x' * n}": 1 for n in range(100) for rank in range(4)}


@both
def test_the_beginning_of_a_line_does_not_wait_for_its_end(elastic: list[str]) -> None:
    with ringrun(*elastic, "-np", "1", "python", "-c", "print('hello', input('name? '), end='')") as job:
        assert job.stdout is not None
        assert job.stdout.read(6) == "name? "
        assert job.communicate("you\n", LIMIT) == ("hello you", "")


@both
def test_no_output_is_lost_at_the_end(elastic: list[str], tmp_path: Path) -> None:
    """More than pipes hold, to a reader that comes when the ranks have been gone for long."""
    code = "import os, sys; sys.stdout.write('x' * 500_000); open(f'{sys.argv[1]}/{os.getpid()}', 'w').close()"
    with ringrun(*elastic, "-np", "2", "python", "-c", code, str(tmp_path)) as job:
        until(lambda: len(done := os.listdir(tmp_path)) == 2 and not any(psutil.pid_exists(int(pid)) for pid in done))
        time.sleep(1.5 * LINGER)
        assert job.communicate(timeout=LIMIT) == ("x" * 1_000_000, "")
