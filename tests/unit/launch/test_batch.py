"""Batch systems by their documented commands, and the scripts of jobs. A real Slurm is in tests/slurm."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.programs import executable
from ring_notebook.launch import cli, job_script, own_batch_job
from ring_notebook.launch.batch_commands import (
    LSF,
    PBS,
    SLURM,
    SYSTEMS,
    BatchError,
    BatchSystem,
    JobState,
    login_node_of,
)
from ring_notebook.launch.job_script import batch_request, sites
from ring_notebook.notebook.magics.commands.ring_export import export
from ring_notebook.notebook.magics.commands.ring_start import start
from ring_notebook.notebook.magics.commands.ring_submit import submit
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.session.session import Session


@pytest.fixture(autouse=True)
def _no_sites(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def script(site: str, **asked: object) -> str:
    return batch_request(site, **asked).script(["sleep", "infinity"], Path("/f/output"))  # type: ignore[arg-type]


def test_a_slurm_job_asks_for_what_the_user_asked_for() -> None:
    assert script("slurm", hosts=2, gpus=8, time="2:00:00", queue="fast", account="me", requeue=True) == (
        "#!/bin/bash\n#SBATCH --job-name=ring_notebook\n#SBATCH --nodes=2\n#SBATCH --ntasks=16\n"
        "#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n#SBATCH --time=2:00:00\n#SBATCH --partition=fast\n"
        "#SBATCH --account=me\n#SBATCH --requeue\n#SBATCH --output=/f/output\nsleep infinity\n"
    )


def test_a_line_without_a_value_is_left_out() -> None:
    made = script("slurm")
    assert not any(word in made for word in ("gpus", "partition", "account", "{"))
    assert "#PBS -l select=2:ncpus=4:mpiprocs=4\n" in script("pbs", hosts=2, n=8)
    assert "#PBS -l select=2:ncpus=4:mpiprocs=4:ngpus=4\n" in script("pbs", hosts=2, gpus=4)


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        ({"nodes": 2, "gpus": 4}, "8"),  # one for each GPU
        ({"nodes": 2}, "2"),  # as the cell had, which is one a host
        ({"nodes": 4}, "4"),  # the cell had fewer than there are hosts
    ],
)
def test_a_job_has_as_many_ranks_however_it_is_asked_for(
    options: dict[str, Any],
    tasks: str,
    monkeypatch: pytest.MonkeyPatch,
    settings: Callable[..., None],
    tmp_path: Path,
) -> None:
    stand_in(monkeypatch, tmp_path / "bin", sbatch="echo 17")
    settings(runs_dir=tmp_path / "runs")
    session = Session()
    record = RunLog(tmp_path / "runs" / "a", "a", "a", 2, "x = 1", {}, {"cluster": "c"})
    record.finish("ok")
    scripts = [start(session, batch="slurm", dry_run=True, **options)]
    export(session, str(tmp_path / "train.py"), "a", job="slurm", **options)
    scripts.append((tmp_path / "train.sh").read_text())
    submit(session, "slurm", "a", **options)
    scripts += [path.read_text() for path in tmp_path.glob("jobs/*/job.sh")]
    assert [re.findall("--ntasks=(.*)", text) for text in scripts] == [[tasks]] * 3
    assert f"-np {tasks} " in scripts[1]


@pytest.mark.parametrize(
    ("given", "time", "minutes"), [("2:00:00", "2:00:00", "120"), ("90m", "1:30:00", "90"), ("45 s", "0:00:45", "1")]
)
def test_times(given: str, time: str, minutes: str) -> None:
    assert f"--time={time}\n" in script("slurm", time=given)
    assert f"-W {minutes}\n" in script("lsf", time=given)


@pytest.mark.parametrize("site", ["aurora", "lsf", "pbs", "perlmutter", "polaris", "slurm"])
def test_every_site_that_we_ship_makes_a_script_that_a_shell_reads(site: str, tmp_path: Path) -> None:
    made = script(site, hosts=2, account="me")
    assert "me\n" in made
    assert "{" not in made
    (tmp_path / "job.sh").write_text(made)
    subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)


ODD = 'My Project 100%j #1 ("it\'s")'


def test_slurm_takes_any_path_of_the_output() -> None:
    made = batch_request("slurm").script(["true"], Path(f"/home/{ODD}/output"))
    (line,) = (line for line in made.splitlines() if "--output" in line)
    # sbatch takes the character behind each backslash, and one percent sign for two.
    assert re.sub(r"\\(.)", r"\1", line).replace("%%", "%") == f"#SBATCH --output=/home/{ODD}/output"
    assert not re.search(r"(?<!\\)[ #'\"]|%j", line.removeprefix("#SBATCH ").replace("%%", ""))


@pytest.mark.parametrize("site", ["aurora", "lsf", "pbs", "polaris"])
def test_the_shell_writes_to_a_path_that_other_systems_would_misread(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ODD
    folder.mkdir()
    monkeypatch.chdir(folder)
    made = batch_request(site, account="me").script(["sh", "-c", "echo out; echo err >&2"], folder / "output")
    assert re.search(r"^#(PBS|BSUB) -o /dev/null$", made, re.MULTILINE), made
    subprocess.run(["bash", "-c", made], check=True)
    assert (folder / "output").read_text() == "out\nerr\n"


def test_a_file_of_the_user_takes_the_place_of_ours(tmp_path: Path) -> None:
    folder = tmp_path / "config" / "ring_notebook" / "sites"
    folder.mkdir(parents=True)
    (folder / "slurm.toml").write_text(
        'system = "slurm"\nqueue = "mine"\nsetup = "module load x"\njob = """\n#SBATCH -p {queue}\n{setup}\n'
        'echo ${HOME} {unknown}\n{command}\n"""\n[environment]\nRING_INTERFACE = "ib 0"\n'
    )
    assert script("slurm") == (
        "#SBATCH -p mine\nexport RING_INTERFACE='ib 0'\nmodule load x\necho ${HOME} {unknown}\nsleep infinity\n"
    )
    assert sites()["slurm"] == folder / "slurm.toml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("system = 1", "system: expected a value of type str"),
        ('system = "slurm"\nhots = 2\njob = ""', "hots: expected one of system, hosts"),
        ('system = "slurm"', "job missing; begin with a copy of"),
        ('system = "sge"\njob = ""', "expected one of slurm, pbs, lsf"),
        ("system =", "broken.toml: Invalid value"),
    ],
)
def test_a_site_that_cannot_be_read_is_named(text: str, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "config" / "ring_notebook" / "sites"
    folder.mkdir(parents=True)
    (folder / "broken.toml").write_text(text)
    with pytest.raises(BatchError, match=said):
        batch_request("broken")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"site": "no"}, "no site 'no'; known are aurora, lsf, pbs, perlmutter, polaris, slurm"),
        ({"site": "slurm", "time": "soon"}, "--time: expected H:MM:SS"),
        ({"site": "slurm", "hosts": 4, "n": 2}, "2 ranks cannot fill 4 hosts"),
        ({"site": "slurm", "queue": "a\n#SBATCH -x"}, "can be no queue or account"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, object], said: str) -> None:
    with pytest.raises(BatchError, match=said):
        batch_request(**asked)  # type: ignore[arg-type]


NOW = 1_800_000_000.0
PBS_JOB = {"job_state": "R", "exec_host": "n1/0*4+n1/1*4+n2/0*4", "stime": time.ctime(NOW)}


@pytest.mark.parametrize(
    ("system", "output", "state"),
    [
        (SLURM, "PENDING|Resources|1800000000|N/A|\n", JobState("waits", "PENDING", "Resources", NOW)),
        (SLURM, "RUNNING|None|1|1800000000|n[1-2]\n", JobState("runs", "RUNNING", "None", 1.0, NOW, ("n1", "n2"))),
        (SLURM, "TIMEOUT|TimeLimit|1|2|n1\n", JobState("ended", "TIMEOUT", "TimeLimit", 1.0, 2.0, ("n1",))),
        (PBS, json.dumps({"Jobs": {"7.srv": PBS_JOB}}), JobState("runs", "R", "", NOW, None, ("n1", "n2"))),
        (
            PBS,
            json.dumps(
                {"Jobs": {"7": {"job_state": "Q", "comment": "x", "estimated": {"start_time": time.ctime(NOW)}}}}
            ),
            JobState("waits", "Q", "x", NOW),
        ),
        (PBS, json.dumps({"Jobs": {"7": {"job_state": "H"}}}), JobState("waits", "H", "held")),
        (PBS, json.dumps({"Jobs": {"7": {"job_state": "F"}}}), JobState("ended", "F")),
        (
            LSF,
            "PEND|New job is waiting for scheduling;|-\n",
            JobState("waits", "PEND", "New job is waiting for scheduling"),
        ),
        (LSF, "RUN|-|4*n1:4*n2\n", JobState("runs", "RUN", hosts=("n1", "n2"))),
        (LSF, "EXIT|-|n1\n", JobState("ended", "EXIT", hosts=("n1",))),
    ],
)
def test_states(system: BatchSystem, output: str, state: JobState) -> None:
    assert system.read(output) == state


@pytest.mark.parametrize(
    ("system", "reason", "said"),
    [
        (SLURM, "Priority", "jobs with a higher priority come first"),
        (SLURM, "JobHeldUser", "it is held (JobHeldUser); `scontrol release 7` lets it start"),
        (SLURM, "PartitionTimeLimit", "it asks for more than the queue may give, and will never start as it is"),
        (SLURM, "QOSMaxJobsPerUserLimit", "a limit of your account or of the queue is reached"),
        (SLURM, "PartitionConfig", "it asks for more than the queue may give"),
        (SLURM, "NewWord", "NewWord"),
        (PBS, "held", "it is held; `qrls 7` lets it start"),
        (LSF, "held", "it is held; `bresume 7` lets it start"),
    ],
)
def test_reasons(system: BatchSystem, reason: str, said: str) -> None:
    assert system.why_it_waits("7", JobState("waits", "", reason)).startswith(said)


def test_the_estimated_start_is_told() -> None:
    said = SLURM.why_it_waits("7", JobState("waits", "", "Resources", time.time() + 3600))
    assert said.startswith("no hosts are free; it should start at ")


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, **programs: str) -> None:
    """Programs of a batch system that this host does not have; all others are missing."""
    folder.mkdir()
    for name, text in programs.items():
        executable(folder / name, f"#!/bin/sh\n{text}\n")
    for name in ("sh", "sed", "cat"):
        (folder / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("name", "programs", "number"),
    [
        ("slurm", {"sbatch": "echo 17;cat $2 >&2"}, "17"),
        ("pbs", {"qsub": "cat $1 >&2; echo 17.server"}, "17.server"),
        ("lsf", {"bsub": "grep -q hold || exit 1; echo 'Job <17> is submitted to queue <normal>.'"}, "17"),
    ],
)
def test_a_job_is_submitted(
    name: str, programs: dict[str, str], number: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, tmp_path / "bin", **programs)
    (tmp_path / "bin" / "grep").symlink_to("/bin/grep")
    (tmp_path / "job.sh").write_text("hold\n")
    assert SYSTEMS[name].submit_script(str(tmp_path / "job.sh")) == number


QUEUES_OF_PBS = """
Queue              Max   Tot Ena Str   Que   Run   Hld   Wat   Trn   Ext Type
---------------- ----- ----- --- --- ----- ----- ----- ----- ----- ----- ----
prod                 0     0 yes yes     0     0     0     0     0     0 Exec
debug                0     0 yes yes     0     0     0     0     0     0 Exec
"""


@pytest.mark.parametrize("queues", ["debug\nprod\n", QUEUES_OF_PBS])
def test_a_rejection_says_why_and_which_queues_there_are(
    queues: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "queues").write_text(queues)
    stand_in(
        monkeypatch,
        tmp_path / "bin",
        qsub="echo 'qsub: Unknown queue' >&2; exit 1",
        qstat=f"while read line; do echo $line; done < {tmp_path}/queues",
    )
    with pytest.raises(BatchError, match=r"PBS has rejected the job: qsub: Unknown queue. Its queues: debug, prod$"):
        PBS.submit_script("job.sh")
    with pytest.raises(BatchError, match=r"sbatch, which submits jobs to Slurm, is not on the PATH"):
        SLURM.submit_script("job.sh")


def test_a_job_that_is_unknown_has_ended_and_silence_says_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, tmp_path / "bin", squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert SLURM.state("7") == JobState("ended", "GONE")
    assert LSF.state("7") is None


@pytest.mark.parametrize("answers", [[None, 100.0], [1000.0, None, 100.0], [None, None, 100.0]])
def test_an_unanswered_question_does_not_end_the_watch_over_the_time_limit(
    answers: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ``answers`` of squeue are the seconds until the limit, None for silence; the end known before stays known."""
    now, left, known = time.time(), iter(answers), list[float | None]()

    def state(_job: str) -> JobState | None:
        known.append(followed.end)
        seconds = next(left, 100.0)
        return None if seconds is None else JobState("runs", "RUNNING", end=now + seconds)

    monkeypatch.setattr(own_batch_job, "SLURM", SimpleNamespace(state=state))
    monkeypatch.setattr(own_batch_job, "_SECONDS_UNTIL_ASKED_AGAIN", 0.01)
    monkeypatch.setattr(own_batch_job, "_SECONDS_AFTER_SILENCE", 0.01, raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    followed, warned = own_batch_job.Walltime(), threading.Event()
    followed.warn = lambda _: warned.set()
    thread = threading.Thread(target=followed._follow, args=("17",))
    thread.start()
    try:
        assert warned.wait(10)
    finally:
        followed.close()
        thread.join()
    assert followed.end == now + 100
    assert None not in known[next(at for at, one in enumerate(answers) if one) + 1 :]


@pytest.mark.parametrize(
    ("programs", "env", "system"),
    [
        ({}, {}, ""),
        ({"sinfo": "echo n1 n1; echo n2 n2"}, {}, "Slurm"),
        ({"sinfo": f"echo n1 n1; echo {socket.gethostname()} x"}, {}, ""),
        ({"sinfo": "exit 1"}, {}, ""),  # a laptop with Slurm's programs and no Slurm
        ({"sinfo": "echo n1 n1"}, {"SLURM_JOB_ID": "7"}, ""),
        ({"pbsnodes": "echo n1; echo '     state = free'; echo; echo n2"}, {}, "PBS"),
        ({"bhosts": "echo n1"}, {}, "LSF"),
    ],
)
def test_what_counts_as_a_login_node(
    programs: dict[str, str], env: dict[str, str], system: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, tmp_path / "bin", **programs)
    found = login_node_of({**os.environ, **env})
    assert (found.name if found else "") == system


def test_ringrun_starts_nothing_on_a_login_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, tmp_path / "bin", sinfo="echo n1 n1")
    with pytest.raises(SystemExit):
        cli.main(["-np", "2", "echo", "started"])
    assert "login node of Slurm, which others work on; start ringrun in a job (sbatch)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hosts", "n", "time", "less"),
    [
        (4, 14, "2:00:00", {"-N 2 -n 8": (2, 8, "2:00:00"), "--time 0:30:00": (4, 14, "0:30:00")}),
        (1, 2, "0:10:00", {"--time 0:03:00": (1, 2, "0:03:00")}),
        (1, 2, "0:03:59", {}),
    ],
)
def test_requests_for_less(hosts: int, n: int, time: str, less: dict[str, tuple[int, int, str]]) -> None:
    found = batch_request("slurm", hosts=hosts, n=n, time=time).smaller()
    assert {options: (one.hosts, one.n, one.time) for options, one in found.items()} == less


def test_when_a_job_would_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = "echo sbatch: Job 2 to start at 1795628570 using 4 processors on nodes n1 in partition all >&2"
    stand_in(monkeypatch, tmp_path / "bin", sbatch=f'test "$(cat)" = script && {told}')
    assert SLURM.starts("script") == 1795628570.0
    assert SLURM.starts("another") is None
    assert PBS.starts("script") is None


def test_the_template_of_a_site_lies_in_the_package() -> None:
    assert (Path(job_script.__file__).parent / "sites" / "slurm.toml").exists()
