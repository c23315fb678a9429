"""Ranks that a server forks: each is what a fresh interpreter would be, and ends with its supervisor."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.forked_ranks import ForkServer
from harness.programs import executable, ran
from harness.waiting import LIMIT, SLEEPS, until
from ring_notebook.launch.supervisor.fork_server import later, start_server
from ring_notebook.launch.supervisor.forked_rank import ADDRESS, ForkedRank, socket_address
from ring_notebook.launch.supervisor.start_and_signal import start_rank

LOOKS = r"""
import atexit, os, resource, signal, sys, threading
atexit.register(print, "the last words")
main = sys.modules["__main__"]
print(sys.argv, sys.orig_argv[1:], sys.path, __name__, vars(main) is globals(), main.__dict__.get("__file__"))
print(sorted(item for item in os.environ.items() if item[0] != "PYTHONSTARTUP"))
print(os.getcwd(), oct(os.umask(0)), os.listdir("/proc/self/fd"), resource.getrlimit(resource.RLIMIT_NOFILE))
print({number: signal.getsignal(number) for number in signal.valid_signals()}, threading.active_count())
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), os.getpgid(0) == os.getpid())
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.name, stream.mode, stream.encoding, stream.errors, stream.line_buffering, stream.write_through)
print(sys.stdin.read(), open("/proc/self/cmdline").read().strip("\0"), "MARK=1" in open("/proc/self/environ").read())
"""
FAILS = "def f():\n    raise ValueError('on purpose')\nf()\n"


def new_name() -> str:
    return f"@test-{uuid.uuid4().hex}"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the ranks of a test look for a server of its own."""
    monkeypatch.setenv(ADDRESS, name := new_name())
    return name


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[bytes]]:
    """One that has imported little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARK", "1")
        process = start_server(name := new_name(), ["json"], os.environ)
        patch.setenv(ADDRESS, name)
        yield process
    process.kill()
    process.wait()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return tmp_path / "program.py"


def run(*arguments: str, **variables: str) -> tuple[type, int, str, str]:
    """How a rank was started, how it ended, and what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != ADDRESS} | variables
    rank = start_rank([sys.executable, *arguments], environment, subprocess.DEVNULL, [], files=(300, 400))
    with rank:
        assert rank.stdout is not None
        assert rank.stderr is not None
        output, errors = rank.stdout.read(), rank.stderr.read()
    return type(rank), rank.returncode, output.decode(), errors.decode()


SLOW = """
import os, time
while not os.path.exists("agent"):
    time.sleep(0.05)
time.sleep(4)
"""
REMOTE_SHELL = '#!/bin/sh\ntouch agent\nshift\nexec sh -c "$*"\n'
PATIENT = """
from ring_notebook.analysis import time_limits
from ring_notebook.launch.supervise import main
time_limits.SILENCE = 2
main()
"""


def test_hosts_do_not_give_each_other_up_while_a_server_imports(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Supervisor and agent wait for it, for twice the seconds in which each must hear of the other."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("RING_REMOTE_SHELL", str(tmp_path / "ssh"))
    (tmp_path / "slow_import.py").write_text(SLOW)
    executable(tmp_path / "ssh", REMOTE_SHELL)
    process = start_server(address, ["slow_import"], os.environ)
    try:
        program = [sys.executable, "-c", "import sys; print('slow_import' in sys.modules)"]
        hosts = f"{socket.gethostname()}:1,127.0.1.1:1"
        command = [sys.executable, "-c", PATIENT, "2", "0", "", hosts, *program]
        done = ran(command)
    finally:
        process.kill()
        process.wait()
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\nTrue\n", "")


AT_ONCE = """
import os, time
while not os.path.exists("go"):
    time.sleep(0.01)
os.getloadavg = lambda: (float(open("load").read()), 0.0, 0.0)
"""
CAN_WAIT = "open('begun', 'w').close()\n__import__('time').sleep(0.5)\n"


@pytest.mark.parametrize(
    ("ranks", "load", "asks_first", "waits"),
    [(1, 0, True, False), (10_000, 0, True, True), (1, 1e6, True, True), (1, 0, False, True)],
    ids=["a core each", "fewer cores", "a busy host", "asks later"],
)
def test_what_can_wait_is_imported_when_nobody_asks(
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    load: float,
    asks_first: bool,
    waits: bool,
) -> None:
    """Ranks that ask before it has begun do without, each on a core of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "at_once.py").write_text(AT_ONCE)
    (tmp_path / "can_wait.py").write_text(CAN_WAIT)
    (tmp_path / "load").write_text(str(load))
    go, begun = tmp_path / "go", tmp_path / "begun"
    program = [sys.executable, "-c", "import sys; print({'at_once', 'can_wait'} <= sys.modules.keys())"]
    environment = {**os.environ, "LOCAL_WORLD_SIZE": str(ranks)}
    with start_server(address, ["at_once", later("can_wait")], os.environ) as server:
        try:
            if not asks_first:
                go.touch()
                until(begun.exists)
            # `waiting` is called when the rank has asked and got no answer.
            with start_rank(program, environment, subprocess.DEVNULL, [], waiting=go.touch) as rank:
                assert isinstance(rank, ForkedRank)
                assert rank.stdout is not None
                assert rank.stdout.read() == f"{waits}\n".encode()
        finally:
            server.kill()


def test_a_server_that_is_to_end_waits_for_its_ranks(address: str) -> None:
    """The process that has started it dies, and a supervisor ends the ranks in its own way."""
    with start_server(address, [], os.environ) as server:
        with start_rank([sys.executable, "-c", SLEEPS], os.environ, subprocess.DEVNULL, []) as rank:
            assert isinstance(rank, ForkedRank)
            server.terminate()
            with pytest.raises(subprocess.TimeoutExpired):
                server.wait(0.3)
            os.kill(rank.pid, signal.SIGTERM)
            assert rank.wait(LIMIT) == -signal.SIGTERM
        assert server.wait(LIMIT) == 0


@pytest.mark.parametrize("unbuffered", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["", "unbuffered"])
@pytest.mark.parametrize("kind", ["text", "file", "module", "package"])
@pytest.mark.parametrize("code", [LOOKS, FAILS, f"{LOOKS}\nsys.exit(4)", "raise SystemExit('a reason')"])
def test_a_rank_is_as_in_an_interpreter_of_its_own(
    server: object, kind: str, code: str, unbuffered: dict[str, str], program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(program.parent)
    program.write_text(code)
    package = program.with_name("package")
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(code)
    arguments = {"text": ["-c", code], "file": ["program.py"]}.get(kind) or [
        "-m",
        program.stem if kind == "module" else kind,
    ]
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    forked = run(*arguments, "an argument", ADDED="here", **unbuffered)
    monkeypatch.delenv(ADDRESS)
    fresh = run(*arguments, "an argument", ADDED="here", **unbuffered)
    assert (forked[0], fresh[0]) == (ForkedRank, subprocess.Popen)
    assert forked[1:] == fresh[1:]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_signal_is_told(server: object, signum: signal.Signals) -> None:
    assert run("-c", f"import os; os.kill(os.getpid(), {int(signum)})\n{SLEEPS}")[:2] == (ForkedRank, -signum)


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["-c", "pass"], {"OMP_NUM_THREADS": "7"}),
        (["-c", "pass"], {"LD_PRELOAD": "/lib/x86_64-linux-gnu/libdl.so.2"}),
        (["-c", "pass"], {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}),
        (["-c", "pass"], {"PYTHONPATH": "/elsewhere"}),
        (["-I", "-c", "pass"], {}),
        (["-"], {}),
        ([], {}),
    ],
)
def test_what_a_fork_cannot_be_is_started_as_usual(
    server: object, arguments: list[str], variables: dict[str, str]
) -> None:
    kind, code, *_ = run(*arguments, **variables)
    assert (kind, code) == (subprocess.Popen, 0)


@pytest.mark.slow
def test_libraries_compute_with_the_threads_of_the_rank(fork_server: ForkServer) -> None:
    """Which they have read already, in the server."""
    look = "import numpy, threadpoolctl, torch; print(torch.get_num_threads(), *(one['num_threads'] for one in "
    with fork_server.used():
        kind, code, output, errors = run("-c", f"{look}threadpoolctl.threadpool_info()))", OMP_NUM_THREADS="3")
    assert (kind, code, errors) == (ForkedRank, 0, "")
    assert len(output.split()) >= 3
    assert {*output.split()} == {"3"}


@pytest.mark.parametrize("left", [0, 1, 3])
def test_a_server_with_few_descriptors_keeps_its_ranks(address: str, left: int) -> None:
    """And those for which there are not enough start as usual."""
    server = start_server(address, [], os.environ)
    with server, start_rank([sys.executable, "-c", SLEEPS], os.environ, subprocess.DEVNULL, []) as rank:
        try:
            assert isinstance(rank, ForkedRank)
            used = {int(name) for name in os.listdir(f"/proc/{server.pid}/fd")}
            limit = [number for number in range(100) if number not in used][left]
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (limit, limit))
            assert run("-c", "print('as usual')")[:3] == (subprocess.Popen, 0, "as usual\n")
            os.kill(rank.pid, signal.SIGTERM)
            assert rank.wait(LIMIT) == -signal.SIGTERM
        finally:
            server.kill()


@pytest.mark.parametrize("sent", [b"", b"nonsense", b"cposix\nnothing\n.", pickle.dumps(3)])
def test_what_is_no_request_is_refused(server: object, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(socket_address(os.environ[ADDRESS]))
        if sent:
            connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    assert run("-c", "pass")[:2] == (ForkedRank, 0)


def test_without_a_server_ranks_start_as_usual(address: str) -> None:
    assert run("-c", "pass")[:2] == (subprocess.Popen, 0)


def test_descriptors_keep_their_numbers(server: object) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        code = f"import socket; socket.socket(fileno={theirs.fileno()}).sendall(b'from the rank')"
        with start_rank([sys.executable, "-c", code], os.environ, subprocess.DEVNULL, [theirs.fileno()]) as rank:
            assert isinstance(rank, ForkedRank)
            assert ours.recv(100) == b"from the rank"


def test_a_process_id_is_kept_until_the_rank_is_waited_for(server: object) -> None:
    rank = start_rank([sys.executable, "-c", "pass"], os.environ, subprocess.DEVNULL, [])
    with rank:
        state = Path(f"/proc/{rank.pid}/stat")
        until(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z")
        assert rank.wait() == 0
    until(lambda: not state.exists())


@contextlib.contextmanager
def supervisor_of_a_rank() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has had a rank forked, and the rank's process id."""
    code = (
        "import subprocess, sys, os; from ring_notebook.launch.supervisor.start_and_signal import start_rank\n"
        f"rank = start_rank([sys.executable, '-c', {SLEEPS!r}], os.environ, subprocess.DEVNULL, [])\n"
        f"print(type(rank).__name__, rank.pid, flush=True)\n{SLEEPS}"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        kind, pid = supervisor.stdout.readline().split()
        assert kind == "ForkedRank"
        yield supervisor, int(pid)
        supervisor.kill()


def test_ranks_end_with_their_supervisor(server: object) -> None:
    with supervisor_of_a_rank() as (_, rank):
        pass
    until(lambda: not Path(f"/proc/{rank}").exists())


@pytest.mark.parametrize("rank_first", [False, True])
def test_the_server_lives_on_when_rank_and_supervisor_end_at_once(
    server: subprocess.Popen[bytes], rank_first: bool
) -> None:
    with supervisor_of_a_rank() as (supervisor, rank):
        server.send_signal(signal.SIGSTOP)  # so that it learns of both together
        try:
            for pid in (rank, supervisor.pid) if rank_first else (supervisor.pid, rank):
                os.kill(pid, signal.SIGKILL)
            supervisor.wait()
        finally:
            server.send_signal(signal.SIGCONT)
    until(lambda: not Path(f"/proc/{rank}").exists())
    assert run("-c", "pass")[:2] == (ForkedRank, 0)


def test_ranks_end_with_the_server(address: str) -> None:
    with (
        start_server(address, [], os.environ) as server,
        start_rank([sys.executable, "-c", SLEEPS], os.environ, subprocess.DEVNULL, []) as rank,
    ):
        server.kill()
        assert isinstance(rank, ForkedRank)
        assert rank.wait(LIMIT) == -signal.SIGKILL


def test_limits_and_umask_are_those_of_the_supervisor(server: object) -> None:
    before, core = os.umask(0o27), resource.getrlimit(resource.RLIMIT_CORE)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, core[1]))
        output = run("-c", "import os, resource; print(os.umask(0), resource.getrlimit(resource.RLIMIT_CORE)[0])")[2]
    finally:
        os.umask(before)
        resource.setrlimit(resource.RLIMIT_CORE, core)
    assert output == f"{0o27} 0\n"
