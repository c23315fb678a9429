"""Jobs over two hosts that our own supervisor starts by a real ssh: streams, signals, deaths, and what listens."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from harness.programs import ran
from harness.two_hosts import ADDRESS_6, ADDRESSES, NAMES, TwoHosts
from harness.waiting import LIMIT, SLEEPS, until
from ring_notebook import __version__
from ring_notebook.launch.remote.frames import MAGIC, Kind, encode

RINGRUN = [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix"]
BOTH = ["-np", "4", "-H", f"{NAMES[0]}:2,{NAMES[1]}:2"]
FAR_FIRST = ["-np", "2", "-H", f"{NAMES[1]}:1,{NAMES[0]}:1"]
SETUP = "from ring_notebook.analysis import time_limits; from ring_notebook.launch import supervise; time_limits."
MPI = "from mpi4py import MPI; w = MPI.COMM_WORLD; w.Barrier()"
WAITS = f"import os\n{MPI}\nos.write(1, b'ready\\n')\n{SLEEPS}"
STOPPED = f"""
import os
{MPI}
try:
    os.write(1, b'ready\\n')
    {SLEEPS}
except KeyboardInterrupt:
    os.write(1, b'stopped %d\\n' % w.rank)
"""


def ringrun(hosts: TwoHosts, *arguments: str, shell: str = '"$@"') -> str:
    """What a job prints, and ``code N`` after it."""
    return hosts.on_first(["sh", "-c", f'{shell}; echo "code $?"', "sh", *RINGRUN, *arguments], LIMIT)


@contextlib.contextmanager
def job_that_waits(hosts: TwoHosts, silence: float = 30.0, program: str = WAITS) -> Iterator[subprocess.Popen[str]]:
    """The supervisor of a job whose ranks have said "ready"; it and its agents give up after ``silence`` seconds."""
    code = f"{SETUP}SILENCE = {silence}; supervise.main()"
    command = [sys.executable, "-c", code, "4", "0", "", BOTH[-1], sys.executable, "-c", program]
    started = hosts.start(command, {"UCX_TLS": "tcp,self", "RING_TEST_SECRET": "of-nobody-else"})
    with started as job:
        try:
            assert job.stdout is not None
            for _ in range(4):
                assert job.stdout.readline().startswith("ready")
            yield job
        finally:
            job.kill()


def agent_and_ssh(hosts: TwoHosts) -> tuple[psutil.Process, psutil.Process]:
    """The agent on the second host, and the ssh on the first one that has started it."""
    found = []
    for pid in hosts.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.cmdline()[-2:] == ["ring_notebook.launch.remote.agent", "plain"]:
                found.append(process)
    (ssh,) = [one for one in found if one.name() == "ssh"]
    agent = min((one for one in found if one.name() != "ssh"), key=lambda one: one.pid)  # the other cleans up after it
    return agent, ssh


def assert_nothing_is_left(hosts: TwoHosts) -> None:
    until(lambda: not hosts.processes(), why=hosts.processes)


@pytest.mark.slow
@pytest.mark.parametrize("where", [BOTH, FAR_FIRST], ids=["here", "there"])
def test_standard_input_goes_to_rank_0(hosts: TwoHosts, where: list[str]) -> None:
    """More of it than any window holds, and as much output back."""
    program = 'test "$PMI_RANK" = 0 || exit 0; md5sum; head -c 5000000 /dev/zero | tr "\\0" a | fold; echo'
    said = ringrun(hosts, *where, "sh", "-c", program, shell='head -c 3000000 /dev/zero | "$@"')
    digest, *lines, code = said.splitlines()
    assert digest.split()[0] == hashlib.md5(bytes(3_000_000)).hexdigest()
    assert code == "code 0"
    assert "".join(lines) == "a" * 5_000_000


def test_the_first_rank_to_fail_is_named_with_its_code(hosts: TwoHosts) -> None:
    said = ringrun(hosts, *BOTH, "python", "-c", f"{MPI}; w.rank == 3 and w.Abort(9); w.Barrier()")
    assert "ringrun: rank 3 on ring-b failed first: exit code 9\ncode 9\n" in said


@pytest.mark.slow  # `make test` runs test_the_first_rank_to_fail_is_named_with_its_code
def test_a_rank_that_fails_ends_the_job_while_the_others_call_nothing(hosts: TwoHosts) -> None:
    """Its exit handlers wait for all ranks, in MPI_Finalize; its agent ends it."""
    code = (
        "import sys, time; from ring_notebook.core import world\n"
        "world.init(); world.current().communicator.barrier()\n"
        "if world.current().rank == 3: sys.exit(7)\n"
        "time.sleep(600)"
    )
    said = ringrun(hosts, *BOTH, "python", "-c", code)
    assert "ringrun: rank 3 on ring-b failed first: exit code 7\ncode 7\n" in said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_trace_has_the_last_operations_of_ranks_on_both_hosts(hosts: TwoHosts, tmp_path: Path, how: str) -> None:
    """Also of a rank on the other host that was killed: its agent sends its log."""
    trace = tmp_path / "trace.json"
    code = (
        "import os, signal; from ring_notebook.core import world\n"
        "world.init(); ring = world.current().communicator; ring.barrier(name='first')\n"
        f"if world.current().rank == 3 and {how!r} == 'kill': os.kill(os.getpid(), signal.SIGKILL)\n"
        "if world.current().rank == 3: raise ValueError('a bad sample')\n"
        "ring.barrier(name='second')"
    )
    said = ringrun(hosts, *BOTH, "--trace-on-error", str(trace), "python", "-c", code)
    what = "raised ValueError: a bad sample" if how == "raise" else "ended (killed by SIGKILL"
    # The second barrier, or the end of the first one where others were still in it.
    assert f"ringrun: rank 3 never came: it {what}" in said or f"ringrun: rank 3 {what}" in said
    assert "called barrier 'second'" in said or "had not completed" in said
    events = json.loads(trace.read_text())["traceEvents"]
    assert {one["pid"] for one in events if one["name"] == "barrier 'first'"} == {0, 1, 2, 3}
    assert [one["pid"] for one in events if one["cat"] == "parting"] == [3]


@pytest.mark.slow
def test_a_program_that_the_other_host_lacks(hosts: TwoHosts) -> None:
    """The hosts share the disk, and each has a /dev/shm of its own."""
    shell = 'ln -s /bin/sleep /dev/shm/only-here; "$@"'
    said = ringrun(hosts, *BOTH, "/dev/shm/only-here", "100", shell=shell)
    assert "on ring-b failed first: there is no program '/dev/shm/only-here'\ncode 127\n" in said


@pytest.mark.slow
def test_what_listens_and_what_others_see(hosts: TwoHosts) -> None:
    """MPI on the link's addresses only, nothing of ours; the environment reaches all ranks and no command line."""
    with job_that_waits(hosts):
        for place, address in zip("ab", ADDRESSES, strict=True):
            sockets = ["ip", "netns", "exec", f"{hosts.prefix}-{place}", "ss", "-Hlntup"]
            shown = ran(sockets, check=True).stdout.splitlines()
            ours = [line.split()[4] for line in shown if '"sshd"' not in line]
            assert len(ours) == 2, shown
            assert all(name.startswith(f"{address}:") for name in ours), shown
        processes = [psutil.Process(pid) for pid in hosts.pids()]
        assert not [one for one in processes if "of-nobody-else" in " ".join(one.cmdline())]
        ranks = [one.environ() for one in processes if "PMI_RANK" in one.environ()]
        assert [environment["RING_TEST_SECRET"] for environment in ranks] == ["of-nobody-else"] * 4
    assert_nothing_is_left(hosts)


@pytest.mark.slow
def test_hosts_that_have_only_ipv6(hosts: TwoHosts) -> None:
    code = (
        "import os, socket; from ring_notebook.core import world\n"
        "world.init(); world.current().communicator.barrier()\n"
        "os.write(1, f\"{os.environ['MASTER_ADDR']} {socket.gethostname()}\\n\".encode())"
    )
    spaces = [f"{hosts.prefix}-{letter}" for letter in "ab"]
    known = hosts.folder / "hosts"
    before = known.read_text()

    def address(action: str, space: str, one: str) -> None:
        subprocess.run(
            ["ip", "-n", space, "addr", action, one, "dev", "link0", *(["nodad"] * (":" in one))], check=True
        )

    try:
        known.write_text("".join(f"{ADDRESS_6.format(number)} {name}\n" for number, name in enumerate(NAMES, 1)))
        for number, space in enumerate(spaces, 1):
            address("add", space, f"{ADDRESS_6.format(number)}/64")
            address("del", space, f"{ADDRESSES[number - 1]}/24")
        one, other = (f"[{ADDRESS_6.format(number)}]:1" for number in (1, 2))
        for where in (f"{NAMES[0].upper()}:1,{other}", f"{other},{NAMES[0]}:1", f"{one},{other}"):
            said = ringrun(hosts, "-np", "2", "-H", where, "python", "-c", code)
            lines = sorted(line.split() for line in said.splitlines())
            assert lines[0] == ["code", "0"], said
            assert [host for _, host in lines[1:]] == list(NAMES), said
    finally:
        known.write_text(before)
        for number, space in enumerate(spaces, 1):
            address("add", space, f"{ADDRESSES[number - 1]}/24")
            address("del", space, f"{ADDRESS_6.format(number)}/64")
    assert_nothing_is_left(hosts)


def test_signals_reach_the_ranks_of_all_hosts(hosts: TwoHosts) -> None:
    with job_that_waits(hosts, program=STOPPED) as job:
        ranks = [one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [""])[-1] == STOPPED]
        for signum, stopped in ((signal.SIGTSTP, 4), (signal.SIGCONT, 0)):
            job.send_signal(signum)
            until(lambda: sum(one.status() == psutil.STATUS_STOPPED for one in ranks) == stopped)  # noqa: B023
        job.send_signal(signal.SIGINT)
        assert job.stdout is not None
        said = job.stdout.read().splitlines()
        assert job.wait(LIMIT) == 128 + signal.SIGINT
    assert sorted(said) == [f"stopped {rank}" for rank in range(4)]


@pytest.mark.parametrize(
    ("harm", "silence", "words"),
    [
        (lambda agent, ssh: agent.kill(), LIMIT, "its host is lost: ssh ended: exit code "),
        (lambda agent, ssh: ssh.kill(), LIMIT, "its host is lost: ssh ended: killed by SIGKILL"),
        (lambda agent, ssh: ssh.suspend(), 4.0, "its host is lost: it has not answered for 4 s"),
        pytest.param(
            lambda agent, ssh: agent.suspend(),
            4.0,
            "its host is lost: it has not answered for 4 s",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["agent killed", "ssh killed", "ssh hung", "agent hung"],
)
def test_a_lost_host_ends_the_job_on_both_sides(
    hosts: TwoHosts, harm: Callable[[psutil.Process, psutil.Process], None], silence: float, words: str
) -> None:
    with job_that_waits(hosts, silence=silence) as job:
        agent, ssh = agent_and_ssh(hosts)
        harm(agent, ssh)
        assert job.stdout is not None
        said = job.stdout.read()
        assert job.wait(LIMIT) == 1
    assert '"rank": 2, "host": "ring-b", "code": 1' in said
    assert words in said
    with contextlib.suppress(psutil.NoSuchProcess):
        agent.resume()  # what cannot run cannot notice
    assert_nothing_is_left(hosts)


def test_nothing_outlives_a_supervisor_that_is_killed(hosts: TwoHosts) -> None:
    with job_that_waits(hosts) as job:
        job.kill()
    assert_nothing_is_left(hosts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("ring-nowhere", "Could not resolve hostname ring-nowhere"),
        ("10.77.0.99", "10.77.0.99 port 22: No route to host"),
    ],
    ids=["unknown", "unreachable"],
)
def test_ringrun_says_once_which_host_it_cannot_use(hosts: TwoHosts, host: str, words: str) -> None:
    said = ringrun(hosts, "-np", "2", "-H", f"{NAMES[0]}:1,{host}:1", "touch", f"{hosts.folder}/touched")
    (message,) = [line for line in said.splitlines() if line.startswith("ringrun: rank")]
    assert f"rank 1 on {host} failed first: its host cannot be used: ssh ended: exit code 255: ssh: " in message
    assert words in message
    assert message.endswith(f" {host} {sys.executable} -V`")
    assert said.endswith("code 1\n")
    assert not (hosts.folder / "touched").exists()
    assert_nothing_is_left(hosts)


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ("ssh", "ssh ended: exit code 255: ssh: Could not resolve hostname ring-nowhere"),
        ("sh -c 'exec /no/such/python'", "/no/such/python"),
        (f"{sys.executable} -m no_such_package.agent", "No module named 'no_such_package'"),
        ("sh -c 'exec sleep 100'", "no answer within 3 s"),
        ("sh -c 'exec yes'", r"it sent what no agent sends: the output of another program: b'y\\ny\\ny"),
        ("sh -c 'echo hi'", "sh closed the connection"),
        ("sh -c 'cat old; sleep 100'", "it has ring_notebook 0.0.1, and ring-a has "),
        ("sh -c 'cat python; sleep 100'", "it has Python 3.9, and ring-a has "),
    ],
    ids=["unknown host", "no python", "no package", "hung", "noise", "ends", "version", "another python"],
)
def test_a_host_that_cannot_be_used_is_named(hosts: TwoHosts, shell: str, words: str) -> None:
    for name, version in (("old", "0.0.1"), ("python", __version__)):
        hello = json.dumps({"host": "x", "ring_notebook": version, "Python": "3.9"}).encode()
        (hosts.folder / name).write_bytes(MAGIC + encode(Kind.HELLO, payload=hello))
    command = [
        sys.executable,
        "-m",
        "ring_notebook.launch.supervise",
        "2",
        "0",
        "",
        "ring-a:1,ring-nowhere:1",
        "touch",
        "started",
    ]
    script = f'cd {hosts.folder}; "$@"; echo "code $?"'
    said = hosts.on_first(
        ["sh", "-c", script, "sh", *command], LIMIT, {"RING_REMOTE_SHELL": shell, "RING_START_TIMEOUT": "3"}
    )
    assert '"rank": 1, "host": "ring-nowhere", "code": 1' in said
    assert "its host cannot be used: " in said
    assert words in said
    assert "code 1\n" in said
    assert not Path(hosts.folder / "started").exists(), "nothing starts before all hosts have answered"
    assert_nothing_is_left(hosts)
