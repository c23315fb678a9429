"""`ringrun` and `%ring start` in an allocation of a real Slurm, whose srun starts our agents. `make test-slurm`."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from harness.slurm import Slurm, missing
from harness.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

HERE = Path(__file__).parent
RINGRUN = [str(Path(sys.executable).with_name("ringrun")), "-np", "4"]
RANK = [sys.executable, str(HERE / "rank.py")]
LINE = re.compile(r"(\d) of 4 on (ring-[ab]): ([\d.]+), above (\[.*\])")


def ranks(output: str) -> list[tuple[str, str, str]]:
    """Rank, host and sum of each rank that has said so."""
    return sorted((rank, host, total) for rank, host, total, _ in LINE.findall(output))


ALL = [("0", "ring-a", "10.0"), ("1", "ring-a", "10.0"), ("2", "ring-b", "10.0"), ("3", "ring-b", "10.0")]


def test_ringrun_runs_on_all_hosts_of_the_allocation(system: Slurm) -> None:
    code, output = system.run(system.python(*RANK, program=RINGRUN))
    assert code == 0, output
    assert ranks(output) == ALL, output
    on_the_other = [above for _, host, _, above in LINE.findall(output) if host == "ring-b"]
    assert all("slurmstepd" in above for above in on_the_other), "srun has not started the agent"


def test_a_batch_script_is_no_rank(system: Slurm, tmp_path: Path) -> None:
    """It is task 0 of 4 itself, which is what no rank may take itself for."""
    shows = "import os; print(os.environ['RANK'], *({'SLURM_PROCID', 'SLURM_NTASKS'} & os.environ.keys()))"
    script, output = tmp_path / "job.sh", tmp_path / "output"
    script.write_text(f"#!/bin/sh\nexec {shlex.join([*RINGRUN, '--no-prefix', sys.executable, '-c', shows])}\n")
    code, said = system.run(["sbatch", "--wait", "--nodes=2", "--ntasks=4", f"--output={output}", str(script)])
    assert code == 0, said
    assert sorted(line for line in output.read_text().splitlines() if line[0].isdigit()) == ["0", "1", "2", "3"]


def test_srun_of_ringrun_is_refused_once(system: Slurm) -> None:
    code, output = system.run(system.python(*RANK, program=["srun", *RINGRUN]))
    assert code != 0, output
    assert output.count("srun has started ringrun 4 times") == 1, output
    assert not LINE.findall(output)


@pytest.mark.parametrize(("how", "code", "said"), [("fail", 1, "on purpose"), ("die", 137, "SIGKILL")])
def test_a_rank_that_fails_ends_the_job(system: Slurm, how: str, code: int, said: str) -> None:
    ended, output = system.run(system.python(*RANK, how, program=RINGRUN))
    assert ended == code, output
    assert said in output
    assert "rank 3" in output


@pytest.mark.parametrize("how", ["interrupt", "scancel"])
def test_a_job_that_is_stopped_leaves_nothing(system: Slurm, how: str) -> None:
    with system.start(system.python(*RANK, "sleep", program=RINGRUN)) as process:
        assert process.stdout is not None
        seen = ""
        while len(ranks(seen)) < 4:
            line = process.stdout.readline()
            assert line, seen
            seen += line
        if how == "scancel":
            assert system.run(["scancel", "--me"])[0] == 0
        else:
            process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(60) != 0
    if how == "scancel":
        assert re.search(r"ringrun: Slurm job \d+ was cancelled \(scancel\)\n", rest), rest
        assert "failed first" not in rest


def wait_for(output: Path, pattern: str, times: int = 1, seconds: float = 90) -> str:
    """What a job has written, once ``pattern`` is in it."""

    def said() -> str:
        return output.read_text() if output.exists() else ""

    until(lambda: len(re.findall(pattern, said())) >= times, seconds, said)
    return said()


def test_the_time_limit_is_announced_and_told(system: Slurm, tmp_path: Path) -> None:
    script, output = tmp_path / "job.sh", tmp_path / "output"
    script.write_text(f"#!/bin/sh\nexec {shlex.join([*RINGRUN, *RANK, 'sleep'])}\n")
    job = system.submit(script, output, "--time=1")
    assert f"ringrun: Slurm job {job} reaches its time limit in " in wait_for(output, "above", 4)
    said = wait_for(output, f"ringrun: Slurm job {job} reached its time limit; ask for more", seconds=180)
    assert "failed first" not in said


def test_a_notebook_says_who_ended_its_job_and_how_long_it_has(system: Slurm) -> None:
    command = ["env", f"PYTHONPATH={HERE.parent}", *system.python(str(HERE / "notebook_in_cancelled_job.py"))]
    code, output = system.run(command)
    assert code == 0, output
    assert re.search(r"status: .*Slurm job \d+ reaches its time limit in \d+:\d\d\n", output, re.DOTALL), output
    assert re.search(r"died: .*Slurm job \d+ was cancelled \(scancel\)\. `%ring start` in a new job", output), output
    assert "stopped: All 4 engines had died already." in output, output
    assert "slurmstepd" not in output


def test_the_doctor_visits_all_hosts_of_the_allocation(system: Slurm) -> None:
    code, output = system.run(system.python(program=[*RINGRUN[:1], "--doctor", "--json"]))
    assert code == 0, output
    found = {(one["host"], one["name"]): one for one in json.loads(output[output.index("[") :])}
    assert {host for host, _ in found} == {"", "ring-a", "ring-b"}
    assert found["", "between hosts"]["found"].startswith("4 ranks of 2 hosts sum at"), output
    assert found["ring-b", "allreduce"]["found"].startswith("2 ranks sum at"), output


def test_a_notebook_starts_its_cluster_over_the_allocation(system: Slurm) -> None:
    code, output = system.run(
        ["env", f"PYTHONPATH={HERE.parent}", *system.python(str(HERE / "notebook_in_allocation.py"))]
    )
    assert code == 0, output
    assert "Started 4 engines" in output, output
    assert "sum 4.0" in output, output
    assert {"ring-a", "ring-b"} <= set(re.findall(r"ring-[ab]", output)), output
