"""A notebook on a login node, whose engines run in a batch job of a real Slurm. `make test-slurm`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from harness.slurm import LOGIN, Slurm, missing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

HERE = Path(__file__).parent


def command(scenario: str, folder: Path, *arguments: str) -> list[str]:
    return [
        *("env", f"PYTHONPATH={HERE.parent}", sys.executable),
        *(str(HERE / "notebook_on_login.py"), scenario, str(folder), *arguments),
    ]


def said(system: Slurm, scenario: str, folder: Path, *arguments: str) -> str:
    """What the notebook of a scenario says."""
    code, output = system.run(command(scenario, folder, *arguments), timeout=900, host=LOGIN)
    assert code == 0, output
    return output


def find(pattern: str, output: str) -> str:
    match = re.search(pattern, output, re.MULTILINE | re.DOTALL)
    assert match, f"no {pattern!r} in: {output}"
    return match[0]


def test_a_cell_waits_for_the_job_and_runs_when_that_does(system: Slurm, tmp_path: Path) -> None:
    output = said(system, "first_cell", tmp_path)
    find("here: .*login node of Slurm.*--batch slurm -N 2", output)
    find("waits: .*Slurm job [0-9]+ waits: (no hosts are free|jobs with a higher priority)", output)
    find("queue: .*0-3 .*Slurm job [0-9]+$", output)
    printed = find("printed: .*seconds", output)
    print(find("^seconds to the first cell: [0-9.]+", output))  # noqa: T201 - pytest -rP shows it
    assert printed.count("4.0 ring-a") == printed.count("4.0 ring-b") == 2
    find("status: .*Slurm job [0-9]+: 4 slots on ring-a, ring-b.*reaches its time limit in", output)
    find(r"stopped: Stopped 4 engines\. Cancelled Slurm job .* CPU hours, .* idle\.", output)
    find(r"jobs: \[\]", output)


def test_a_job_that_cannot_start_says_why(system: Slurm, tmp_path: Path) -> None:
    output = said(system, "refused", tmp_path)
    find(r"^ringrun: \(2, '', .*login node of Slurm, which others work on; start ringrun in a job", output)
    find(r"^ringrun: \(0, 'ran", output)
    find("sooner: .*no hosts are free.*Less would have started sooner: `-N 1 -n 2` at once", output)
    find(r"^queue: ClusterError: Slurm has rejected the job: Invalid partition name .*Its queues: all$", output)
    find(r"waits: it asks for more than the queue may give, and will never start .*PartitionTimeLimit", output)
    find(r"is held \(JobHeld\w+\); `scontrol release [0-9]+` lets it start", output)
    find(r"^cancelled: ClusterError: Slurm job [0-9]+ was cancelled \(scancel\)", output)
    find(r"^cell: ClusterError: Slurm job [0-9]+ was cancelled \(scancel\)", output)


def test_a_job_that_is_cancelled_ends_its_cell(system: Slurm, tmp_path: Path) -> None:
    output = said(system, "cancelled", tmp_path)
    find(r"^cell: ClusterError: Slurm job [0-9]+ was cancelled \(scancel\)", output)
    find(r"^status: ClusterError: Slurm job [0-9]+ was cancelled \(scancel\)", output)
    find(r"^jobs: \[\]", output)


def test_a_kept_job_is_found_by_the_next_kernel(system: Slurm, tmp_path: Path) -> None:
    """While it waits, and while its engines run."""
    output = said(system, "kept", tmp_path)
    assert len(re.findall("^loaded: Slurm job [0-9]+ for 4 engines .*`%ring attach`", output, re.MULTILINE)) == 2
    find("^pulled: 10$", output)
    find("^stopped: Stopped 4 engines. Cancelled Slurm job", output)
    find(r"^jobs: \[\]", output)


@pytest.mark.timeout(600)
def test_a_checkpoint_is_written_before_the_time_limit(system: Slurm, tmp_path: Path) -> None:
    output = said(system, "out_of_time", tmp_path)
    find("^cell: ClusterError: Slurm job [0-9]+ reached its time limit; ask for more", output)
    find("^checkpoints: /.*step", output)
    find("^status: ClusterError: Slurm job [0-9]+ reached its time limit", output)
    find("^snapshots: .*^walltime ", output)


def test_a_job_that_is_put_back_resumes(system: Slurm, tmp_path: Path) -> None:
    output = said(system, "requeued", tmp_path)
    find("^waits: .*Slurm job [0-9]+ waits", output)
    find("^again: .*in run", output)
    find("^jobs: True", output)
    find("^run: .*resumed", output)


def test_a_host_that_is_lost_is_named(system: Slurm, tmp_path: Path) -> None:
    with system.start(command("host_lost", tmp_path), LOGIN) as process:
        assert process.stdout is not None
        try:
            before = ""
            while "ready" not in before:
                line = process.stdout.readline()
                assert line, before
                before += line
            system.set_host(1, "down")
            output = process.stdout.read()
            assert process.wait(60) == 0, output
        finally:
            system.set_host(1, "up")
    find("^cell: .*ring-b", output)
    system.wait_until_up()


def test_an_idle_job_is_given_back_and_its_variables_are_kept(system: Slurm, tmp_path: Path) -> None:
    output = said(system, "idle", tmp_path)
    find("^released: ClusterError: Released the hosts of Slurm job [0-9]+.* Kept 1 variable of 4 ranks as idle", output)
    find("^snapshots: .*^idle ", output)
    find("^restored: .*idle", output)
    find("^stopped: Stopped 4 engines", output)


def test_a_cell_is_submitted_and_exported_as_a_job(system: Slurm, tmp_path: Path) -> None:
    output = said(system, "submitted", tmp_path)
    find("^submitted: Submitted Slurm job [0-9]+ for 4 ranks on 2 hosts", output)
    find("^far .* ok .* 4 .*^far .* ok .* 2 ", output)
    printed = find("^printed: .*exported:", output)
    assert printed.count("4.0 ring-") == 4
    assert "a token of the kernel" in printed, "the environment of the kernel"
    assert find("^script: .*", output).count("4.0 ring-") == 4


def test_a_dry_run_starts_nothing(system: Slurm, tmp_path: Path) -> None:
    output = said(system, "script", tmp_path)
    find("^#SBATCH --nodes=2$.*^#SBATCH --time=0:10:00$.*^sleep infinity$", output)
    find(r"^jobs: \[\]", output)


@pytest.mark.timeout(900)
def test_kernels_that_are_killed_leave_no_job(system: Slurm, tmp_path: Path) -> None:
    assert said(system, "killed", tmp_path, "200").count("loaded: ") == 200
