"""ringrun and run() with real processes: results, who failed first, signals, and nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from harness.programs import RINGRUN, executable, ran, ringrun
from harness.waiting import LIMIT, SLEEPS, until
from ring_notebook import __version__
from ring_notebook.analysis.job_failure import RankFailure
from ring_notebook.errors import RunFailed
from ring_notebook.launch import job as jobs
from ring_notebook.launch.cli import main
from ring_notebook.launch.launchers.hosts import Host
from ring_notebook.launch.launchers.site_launchers import OpenMPI
from ring_notebook.launch.run_function import run
from ring_notebook.launch.supervisor.stderr_reports import split_reports
from ring_notebook.notebook.run.catalogue import find, listing
from ring_notebook.rank.rank_status import rank_of_process

PROGRAM = r"""
import os, signal, sys, time
rank = int(os.environ["RANK"])
what = sys.argv[1]
os.write(1, f"rank {rank} got {sys.argv[2:]}\n".encode())  # in one piece, whatever Python's buffering
if what == "exit" and rank == 1: sys.exit(3)
if what == "kill" and rank == 1: os.kill(os.getpid(), signal.SIGKILL)
if what == "sleep":
    SLEEPS
""".replace("SLEEPS", SLEEPS)


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_every_rank_runs_the_program(program: str) -> None:
    """What stands behind the dashes that end the options is its own."""
    done = ringrun("-np", "3", "--", "python", program, "ok", "--flag", "a b", "--")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} got ['--flag', 'a b', '--']" for rank in range(3)]


@pytest.mark.parametrize("mpi_args", ["", "-genv UNUSED 1"], ids=["supervisor", "mpiexec"])
def test_each_rank_sees_an_instance_of_a_divided_gpu(mpi_args: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    program = ["python", "-c", "import os; os.write(1, os.environ['CUDA_VISIBLE_DEVICES'].encode() + b';')"]
    done = ringrun("-np", "3", f"--mpi-args={mpi_args}", *program)
    assert sorted(done.stdout.split(";")) == ["", "MIG-a", "MIG-a", "MIG-b"], done.stderr
    assert done.stderr == "ringrun: 3 ranks share 2 GPUs, so sums of GPU tensors go through CPU memory\n"


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("exit", 3, "rank 1 on {host} failed first: exit code 3"),
        ("kill", 137, "rank 1 on {host} failed first: killed by SIGKILL"),
    ],
)
def test_the_rank_that_failed_first_is_named(program: str, what: str, code: int, words: str) -> None:
    done = ringrun("-np", "3", "python", program, what)
    assert done.returncode == code
    assert "ringrun: " + words.format(host=os.uname().nodename) in done.stderr
    assert "\x1e" not in done.stderr


@pytest.mark.parametrize("elastic", [[], ["--elastic"]], ids=["mpi", "elastic"])
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_ends_every_rank(program: str, elastic: list[str], signum: signal.Signals, code: int) -> None:
    command = [*RINGRUN, "--no-prefix", *elastic, "-np", "2", "python", program, "sleep"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline().startswith("rank")
        process.send_signal(signum)
        assert process.wait(LIMIT) == code
    # That no rank is left is proven for the whole file, by the fixture that looks for leftovers.


_FORKS = f"import os; child = os.fork(); os.write(1, b'%d\\n' % os.getpid())\n{SLEEPS}"
_RUN = f"import ring_notebook\nring_notebook.run(lambda: exec({_FORKS!r}), n=2)"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["-m", "ring_notebook.launch.cli", "--no-prefix", "-np", "2", "python", "-c", _FORKS], 128 + signal.SIGTERM),
        (["-c", _RUN], -signal.SIGTERM),
    ],
    ids=["ringrun", "run"],
)
def test_ctrl_z_stops_every_rank_and_its_children_until_it_is_continued(command: list[str], code: int) -> None:
    command = [sys.executable, *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        processes = [psutil.Process(int(job.stdout.readline())) for _ in range(4)]

        def are(status: str) -> bool:
            return all((one.status() == psutil.STATUS_STOPPED) == (status == "stopped") for one in processes)

        job.send_signal(signal.SIGTSTP)
        until(lambda: are("stopped") and psutil.Process(job.pid).status() == psutil.STATUS_STOPPED)
        job.send_signal(signal.SIGCONT)
        until(lambda: are("running"))
        job.send_signal(signal.SIGTSTP)
        until(lambda: are("stopped") and psutil.Process(job.pid).status() == psutil.STATUS_STOPPED)
        job.send_signal(signal.SIGTERM)  # as `kill %1` of a shell, which sends both
        job.send_signal(signal.SIGCONT)
        assert job.wait(LIMIT) == code
    until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes))


def test_settings_reach_the_ranks() -> None:
    code = "import os; print(os.environ['RING_TIMELINE'], os.environ['RING_FUSION_THRESHOLD'])"
    done = ringrun("-np", "1", "--timeline-filename", "t.json", "--fusion-threshold-mb", "2", "python", "-c", code)
    assert done.stdout.split() == ["t.json", "2097152"]


SCALED = """
import time
from ring_notebook.api.basics import init, rank, shutdown, size
from ring_notebook.api.objects import allreduce_numbers
from ring_notebook.core import metrics
from ring_notebook.core.communicator import ReduceOp
init()
for step in range(8):
    time.sleep(0.05)
    allreduce_numbers(range(1000), ReduceOp.SUM, "numbers")
    for _ in range(2):  # as a rank that carries two logical ranks
        metrics.log(step=step, samples=5 * (step > 0))
print("rank", rank(), "of", size())
shutdown()
"""


@pytest.mark.slow
def test_a_script_at_several_sizes(tmp_path: Path) -> None:
    """The same table as in a notebook, from what each rank has measured; the ranks' reports are not shown."""
    (tmp_path / "train.py").write_text(SCALED)
    command = [*RINGRUN, "--scale", "1,2", "--warmup", "3", "--predict", "4"]
    files = ["--csv", "scale.csv", "--output-dir", "out"]
    done = ran([*command, *files, "train.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\x1e" not in done.stdout + done.stderr
    printed = done.stdout.splitlines()
    begins = next(index for index, line in enumerate(printed) if line.startswith("ranks "))
    assert sum("rank 1 of 2" in line for line in printed[:begins]) == 1
    assert "rank 1 of 2\n" in (tmp_path / "out" / "np.2" / "run.1" / "rank.1" / "stdout").read_text()
    shown = printed[begins].replace("off core", "")  # of a busy machine
    assert shown.split()[-5:] == ["compute", "asleep", "loading", "moving", "waiting"]
    assert [line.split()[0] for line in printed[begins + 1 : begins + 4]] == ["1", "2", "4"]
    assert [line.split()[2] for line in printed[begins + 1 : begins + 3]] == ["10", "20"]  # the global batch
    assert "Weak scaling: 10 samples a rank." in printed
    rows = [line.split(",") for line in (tmp_path / "scale.csv").read_text().splitlines()]
    assert [row[0] for row in rows] == ["ranks", "1", "2", "4"]
    named = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    assert [row["high"] for row in named[:2]] == ["", ""]
    low, efficiency, high = (float(named[2][name]) for name in ("low", "efficiency", "high"))
    assert low <= efficiency <= high


LOGS = """
import sys, time
from ring_notebook.core import metrics
lr, goes_on = 0.1, "fail" not in sys.argv
for step in range(9):
    time.sleep(0.02)
    metrics.log(step=step, loss=1 / (step + 1), samples=4)
sys.exit(0 if goes_on else 3)
"""


def test_a_training_is_one_of_the_runs(tmp_path: Path, settings: Callable[..., None]) -> None:
    """Of the folder's notebooks too. A program that logs nothing is none."""
    settings(runs_dir=tmp_path / "runs")
    (tmp_path / "train.py").write_text(LOGS)
    assert ringrun("-np", "1", "python", "-c", "pass").returncode == 0
    assert not (tmp_path / "runs").exists()
    assert ringrun("-np", "2", str(tmp_path / "train.py")).returncode == 0
    assert ringrun("-np", "1", str(tmp_path / "train.py"), "fail").returncode == 3
    rows = [dict(zip(listing().columns, row, strict=True)) for row in listing().rows]
    assert [(row["name"], row["status"], row["ranks"], row["loss"]) for row in rows] == [
        ("train.py", "failed", "1", "0.1111"),
        ("train.py", "ok", "2", "0.1111"),
    ]
    run = find("train.py")
    assert (run.source, run.params["lr"]) == (LOGS, 0.1)
    assert "exit code 3" in run.summary["error"]
    assert run.view().ranks[0].last == {}, "rows are not kept"
    assert (tmp_path / "runs").stat().st_mode & 0o77 == 0


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("pass", 2, "--scale 1: 1 of 1 ranks logged too few steps after --warmup 1; each step has to call ring.log"),
        ("import sys; sys.exit(5)", 5, "rank 0 on "),
    ],
)
def test_a_script_whose_scaling_cannot_be_measured(program: str, code: int, words: str) -> None:
    done = ringrun("--scale", "1,2", "python", "-c", program)
    assert done.returncode == code
    assert words in done.stderr
    assert "2 ranks" not in done.stderr, "the first that fails is the last"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"ringrun {__version__}\n")


@pytest.mark.parametrize("elastic", [[], ["--elastic"]], ids=["mpi", "elastic"])
@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["./trian.py"], 127, "there is no program './trian.py'"),
        (["trian"], 127, "there is no program 'trian'"),
        (["tool"], 127, "there is no program 'tool' on the PATH; did you mean: ./tool"),
        (["./data"], 126, "./data is not executable"),
        (["./folder"], 126, "./folder is a directory"),
        (
            ["./bang.py"],
            126,
            "the first line of ./bang.py names an interpreter that does not exist; did you mean: python",
        ),
        (["./bang"], 126, "the first line of ./bang names an interpreter that does not exist"),
        (["./tool"], 126, "./tool cannot be started: its first line names no interpreter, such as #!/bin/sh"),
        (["./built"], 126, "./built cannot be started: it was built for another processor or system"),
    ],
)
def test_a_program_that_cannot_be_started(
    elastic: list[str], command: list[str], code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line of why, with the exit code of a shell; each rank has its own where only the start itself can tell."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, mode in (("data", 0o644), ("tool", 0o755), ("bang.py", 0o755), ("bang", 0o755), ("built", 0o755)):
        text = "#!/no/such/interpreter\n" if "bang" in name else "\x7fELF" if name == "built" else "1\n"
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    done = ringrun(*elastic, "-np", "2", *command)
    assert done.returncode == code
    said = done.stderr.splitlines()
    assert said[0].startswith(f"ringrun: {words}")
    if "start" in words or "line" in words:
        assert set(said[1:-1]) <= {said[0]}
        assert said[-1].endswith(f"failed first: exit code {code}") or f"failed (exit code {code})" in said[-1]
    else:
        assert len(said) == 1


GROWS = """
import os, time
from ring_notebook.api.basics import init
init()
open("formed", "w").close()
while not os.path.exists("end"):
    time.sleep(0.05)
"""


def test_an_elastic_job_lives_on_where_no_host_can_be_added(tmp_path: Path) -> None:
    """What starts agents is gone, or no process can be started for it."""
    executable(tmp_path / "hosts", "#!/bin/sh\necho localhost:1\ntest ! -e formed || echo 127.0.1.1:1\n")
    options = ["-np", "1", "--min-np", "1", "--max-np", "2", "--host-discovery-script", "./hosts"]
    environment = {**os.environ, "RING_REMOTE_SHELL": str(tmp_path / "none")}
    with subprocess.Popen(
        [*RINGRUN, *options, sys.executable, "-c", GROWS],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stderr is not None
        said = [next(line for line in job.stderr if "cannot start the ranks" in line)]
        (tmp_path / "end").touch()
        said += job.stderr
        assert job.wait(LIMIT) == 0, said


@pytest.mark.parametrize(
    ("name", "first_line", "mode", "shown"),
    [
        ("train.py", "", 0o644, "python"),
        ("./train.py", "", 0o644, "python"),
        ("./begun.py", "", 0o755, "python"),
        ("./own.py", f"#!{sys.executable} -OO", 0o755, "own"),
        ("own.py", f"#!{sys.executable} -OO", 0o755, "python"),
    ],
)
def test_a_script_runs_in_python(
    name: str, first_line: str, mode: int, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it says itself what runs it, and the shell would do so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(
        f"{first_line}\nimport sys; print('own' if sys.flags.optimize else 'python', sys.argv[1:])"
    )
    (tmp_path / name).chmod(mode)
    done = ringrun("-np", "1", name, "--lr", "1")
    assert (done.returncode, done.stdout) == (0, f"{shown} ['--lr', '1']\n"), done.stderr


SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("env", "np", "code", "words"),
    [
        (SRUN, "4", 2, "srun has started ringrun 4 times, and each would start a job of its own; start it once"),
        ({**SRUN, "SLURM_PROCID": "3"}, "4", 2, ""),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "2", 2, "mpiexec has started ringrun 2 times"),
        (SRUN, "1", 0, ""),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, "2", 0, ""),
        ({**SRUN, "RING_JOB_VARIABLES": "RANK"}, "2", 0, ""),
    ],
    ids=["first", "fourth", "mpiexec", "alone", "one task", "in a rank"],
)
def test_ringrun_started_several_times(
    env: dict[str, str], np: str, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them says so; a job for each would train n times, or wait for ports and hosts of the others."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    done = ringrun("-np", np, "true")
    assert done.returncode == code
    assert (words in done.stderr) if words else ("started" not in done.stderr)


def test_a_job_exports_all_that_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "find_launcher", lambda *_: OpenMPI("true"))
    job = jobs.Job(["p"], 2, [Host("a", 1), Host("b", 1)], {"RING_RUN_KEY": "secret", "OWN": "1"})
    assert job.wait() == 0
    exported = {name for flag, name in zip(job.command, job.command[1:], strict=False) if flag == "-x"}
    assert {"RING_RUN_KEY", "OWN"} <= exported
    assert "secret" not in " ".join(job.command), "all users of a host see command lines"


def test_reports_are_taken_out_of_the_output() -> None:
    report = b'\x1e{"rank": 1, "host": "a", "code": -11, "time": 2.0}\x1e\n'
    failure = RankFailure(1, "a", -11, 2.0)
    assert split_reports(b"one\n" + report + b"two\n") == (b"one\ntwo\n", [failure], b"")
    assert split_reports(b"one\n" + report[:20]) == (b"one\n", [], report[:20])
    assert split_reports(report[:20] + report[20:]) == (b"", [failure], b"")


@pytest.mark.parametrize(
    "printed",
    [
        b'\x1e{"a": 1}',
        b'\x1e{"rank": "1", "host": "a", "code": 1, "time": 0}',
        b"\x1e{not json}",
        b"\x1e{" + b'"a":[' * 800 + b"}",
        b"\x1e{\n",
        b"\x1e",
    ],
    ids=lambda printed: repr(printed[:12]),
)
def test_what_only_looks_like_a_report_is_output(printed: bytes) -> None:
    report = b'\x1e{"rank": 1, "host": "a", "code": 2, "time": 2.0}\x1e\n'
    assert split_reports(printed + b"\x1e\n") == (printed + b"\x1e\n", [], b"")
    assert split_reports(printed + report + b"!") == (printed + b"!", [RankFailure(1, "a", 2, 2.0)], b"")


def test_separators_in_the_output_do_no_harm() -> None:
    code = r"import os; os.write(2, b'\x1e{\"a\": 1}\x1e')"
    done = ringrun("-np", "1", "python", "-c", code)
    assert (done.returncode, done.stderr) == (0, '\x1e{"a": 1}\x1e')


TRACED = """
import os, resource, sys
from ring_notebook.api.basics import init, rank, stop_timeline
from ring_notebook.api.basics import barrier
init()
barrier()
if sys.argv[1].startswith("full"): resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
if sys.argv[1].endswith("stop"): stop_timeline()
if sys.argv[1].startswith("die") and rank() == 1:
    if sys.argv[1].endswith("elsewhere"): os.unlink(os.environ["RING_TIMELINE"].replace(".json", ".rank1.json"))
    os._exit(3)
"""


@pytest.mark.slow
def test_the_timeline_is_one_file(tmp_path: Path) -> None:
    """Of all ranks whose parts are here, also those of ranks that were killed, and none of earlier jobs."""
    (tmp_path / "traced.py").write_text(TRACED)
    trace = tmp_path / "trace.json"
    for how, code, ranks in (("die", 3, {0, 1}), ("die elsewhere", 3, {0}), ("stop", 0, {0, 1})):
        flags = ["-np", "2", "--timeline-filename", str(trace)]
        done = ringrun(*flags, "python", str(tmp_path / "traced.py"), how)
        assert done.returncode == code, done.stderr
        events = json.loads(trace.read_text())["traceEvents"]
        assert {event["pid"] for event in events} == ranks
        assert any(event["name"].startswith("barrier") for event in events)
        assert (f"ringrun: {trace} shows 1 of 2 ranks" in done.stderr) is (how == "die elsewhere")
    done = ringrun(*flags, "true")
    assert (done.returncode, done.stderr) == (0, f"ringrun: no rank has written a timeline for {trace} on this host\n")


@pytest.mark.parametrize("how", ["full", "full, stop"])
def test_a_timeline_that_the_disk_does_not_take(how: str, tmp_path: Path) -> None:
    """A line for each file and no traceback, and nothing of the file is left; a limit stands for the full disk."""
    (tmp_path / "traced.py").write_text(TRACED)
    trace = tmp_path / "trace.json"
    done = ringrun("-np", "2", "--timeline-filename", str(trace), "python", str(tmp_path / "traced.py"), how)
    assert done.returncode == 0
    files = [trace.with_suffix(f".rank{rank}.json") for rank in range(2)]
    said = [f"the timeline {path} cannot be written: File too large" for path in files]
    assert sorted(done.stderr.splitlines()) == sorted(
        [*said, f"ringrun: no rank has written a timeline for {trace} on this host"]
    )
    assert [path.name for path in tmp_path.iterdir()] == ["traced.py"]


def rank_times(factor: int, plus: int = 0) -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank * factor + plus


def test_run_gives_results_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(rank_times, (10,), {"plus": 1}, n=3) == [1, 11, 21]
    assert run(lambda: sys.stdout.write("hello"), n=1) == [5]
    assert capsys.readouterr().out == "hello"


def test_run_raises_what_the_rank_raised() -> None:
    def fail() -> None:
        if rank_of_process() == 1:
            raise LookupError("nothing at rank 1")

    with pytest.raises(LookupError, match="nothing at rank 1") as caught:
        run(fail, num_proc=2)
    assert isinstance(caught.value.__cause__, RunFailed)
    assert "rank 1 of 2 raised:\nTraceback" in str(caught.value.__cause__)


def test_run_says_which_rank_called_exit_while_the_others_compute() -> None:
    def leave() -> None:
        from ring_notebook.core import world

        world.init()
        if world.current().rank == 1:
            sys.exit(3)
        time.sleep(600)

    words = r"^rank 1 of 2 called sys.exit\(3\); return from the function to end its work$"
    with pytest.raises(RunFailed, match=words) as caught:
        run(leave, n=2)
    said = str(caught.value.__cause__)
    assert said.startswith("rank 1 of 2 raised:\nTraceback")
    assert said.endswith("    sys.exit(3)\nSystemExit: 3\n"), said


def test_run_says_which_rank_returned_what_cannot_be_pickled() -> None:
    def lock() -> object:
        return threading.Lock() if rank_of_process() == 1 else 0

    words = r"^rank 1: the function returned an object of lock that cannot be pickled \(cannot pickle '_thread.lock'"
    with pytest.raises(TypeError, match=words):
        run(lock, n=2)


def test_run_says_which_rank_returned_what_cannot_be_unpickled() -> None:
    class Opened:
        def __reduce__(self) -> object:
            return open, ("/nobody/has/this",)

    words = r"^rank 1 of 2 returned a value that cannot be unpickled here \(FileNotFoundError: "
    with pytest.raises(RunFailed, match=words):
        run(lambda: Opened() if rank_of_process() == 1 else 0, n=2)


def test_run_says_which_rank_exited_without_a_result() -> None:
    with pytest.raises(
        RunFailed, match=r"^no result from ranks \[1\], which exited with code 0; return from the function"
    ):
        run(lambda: os._exit(0) if rank_of_process() == 1 else 0, n=2)


def test_run_says_which_rank_died() -> None:
    def die() -> None:
        if rank_of_process() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)

    with pytest.raises(RunFailed, match=r"rank 1 on .* failed first: killed by SIGKILL.*no result from ranks"):
        run(die, n=2)


@pytest.mark.slow
def test_run_says_which_rank_died_where_another_one_is_faster() -> None:
    """What has started the ranks is held up, while rank 0 says what it knows of the death, and ends."""

    def die() -> None:
        from ring_notebook.core import world

        world.init()
        if rank_of_process() == 1:
            starter = os.getppid()
            os.kill(starter, signal.SIGSTOP)
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {starter}"], start_new_session=True)
            os.kill(os.getpid(), signal.SIGKILL)
        world.current().communicator.barrier()

    with pytest.raises(RunFailed, match=r"rank 1 on .* failed first: killed by SIGKILL.*no result from ranks \[0, 1\]"):
        run(die, n=2)


@pytest.mark.slow
def test_run_moves_large_results() -> None:
    sizes = [len(part) for part in run(lambda: bytes(30 << 20), n=2)]
    assert sizes == [30 << 20] * 2


PLACE = '#!/bin/sh\nshift\nunset TMPDIR\nexport CUDA_VISIBLE_DEVICES=GPU-b XDG_RUNTIME_DIR=/b\nexec sh -c "$*"\n'
SHOW = "import os; print(*(os.environ[name] for name in ('CUDA_VISIBLE_DEVICES', 'XDG_RUNTIME_DIR', 'TMPDIR')))"


@pytest.mark.parametrize(
    ("given", "there"), [({}, "GPU-b /b /a"), ({"CUDA_VISIBLE_DEVICES": "7"}, "7 /b /a")], ids=["", "given"]
)
def test_ranks_of_another_host_keep_what_is_that_host_s_own(
    given: dict[str, str],
    there: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its GPUs above all, which a batch system or an engine gave to it; but a variable that is given wins."""
    monkeypatch.setenv("RING_REMOTE_SHELL", str(executable(tmp_path / "ssh", PLACE)))
    for name, value in {"CUDA_VISIBLE_DEVICES": "GPU-a", "XDG_RUNTIME_DIR": "/a", "TMPDIR": "/a"}.items():
        monkeypatch.setenv(name, value)
    job = jobs.Job([sys.executable, "-c", SHOW], 2, [Host("localhost", 1), Host("127.0.1.1", 1)], given)
    assert job.wait() == 0
    here = f"{given.get('CUDA_VISIBLE_DEVICES', 'GPU-a')} /a /a"
    assert sorted(capsys.readouterr().out.splitlines()) == sorted([here, there])
