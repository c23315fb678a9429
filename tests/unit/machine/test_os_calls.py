"""Substitutes of system calls: each with the calls refused, in a process of its own."""

from __future__ import annotations

import os
import select
import socket
import sys
from pathlib import Path

import pytest

from harness.programs import ran
from ring_notebook.machine import os_calls

TESTS = Path(__file__).parents[2]


def refused(names: str, code: str, error: int = 1) -> str:
    """What a program prints whose calls of these names are refused."""
    program = [sys.executable, str(TESTS / "places" / "refusing.py"), str(error), names, sys.executable, "-c", code]
    done = ran(program)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("names", ["", "pidfd_open"])
def test_the_end_of_a_child_and_of_another_process_is_seen(names: str) -> None:
    code = """
import os, select, subprocess, sys
from ring_notebook.machine.os_calls import exit_descriptor
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
shell = subprocess.Popen(["sh", "-c", "sleep 100 & echo $!; read x; kill $!; wait; read x"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
other = int(shell.stdout.readline())
ends = {"child": exit_descriptor(child.pid), "other": exit_descriptor(other)}
assert not select.select(list(ends.values()), [], [], 0.1)[0]
child.stdin.close()
assert select.select([ends["child"]], [], [], 30)[0]
print(child.wait(), bool(select.select([ends["other"]], [], [], 0)[0]))
shell.stdin.write(b"\\n"); shell.stdin.flush()
assert select.select([ends["other"]], [], [], 30)[0]
shell.stdin.close(); shell.wait()
try: exit_descriptor(other)
except ProcessLookupError: print("none")
"""
    assert refused(names, code) == "1 False\nnone"


def test_a_fork_does_not_hide_the_end_of_a_process() -> None:
    """A fork has the ends of pipes that its parent's thread would close."""
    code = """
import os, select, subprocess, sys, warnings
from ring_notebook.machine.os_calls import exit_descriptor
warnings.simplefilter("ignore")
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
end = exit_descriptor(child.pid)
held, hold = os.pipe()
if os.fork() == 0:
    os.close(hold); child.stdin.close(); os.read(held, 1); os._exit(0)
child.stdin.close()
print(bool(select.select([end], [], [], 30)[0]))
"""
    assert refused("pidfd_open", code) == "True"


def test_the_thread_that_looks_ends_with_what_it_looks_at() -> None:
    code = """
import os, subprocess, sys, threading, time
from ring_notebook.machine.os_calls import exit_descriptor
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
os.close(exit_descriptor(child.pid))
ends = time.monotonic() + 30
while threading.active_count() > 1 and time.monotonic() < ends: time.sleep(0.01)
print(threading.active_count())
child.stdin.close(); child.wait()
"""
    assert refused("pidfd_open", code) == "1"


@pytest.mark.parametrize("names", ["", "memfd_create"])
def test_memory_without_a_name_is_opened_by_another_process(names: str) -> None:
    code = """
import os, subprocess, sys
from ring_notebook.machine.os_calls import memory_file
file = memory_file("test")
path = f"/proc/{os.getpid()}/fd/{file}"
subprocess.run([sys.executable, "-c", f"open({path!r}, 'w').write('told')"], check=True)
print(os.pread(file, 9, 0).decode(), os.fstat(file).st_nlink, os.get_inheritable(file))
"""
    assert refused(names, code) == "told 0 False"


def test_an_error_names_the_call_and_what_to_do_where_nothing_takes_its_place() -> None:
    code = """
from ring_notebook.machine import os_calls
os_calls.memory_folders = lambda: []
try: os_calls.memory_file("test")
except OSError as error: print(error)
"""
    said = refused("memfd_create", code)
    assert "memfd_create is refused" in said
    assert "allow the call, or make /tmp writable" in said


def test_a_loop_is_woken_as_often_as_it_sleeps() -> None:
    wake = os_calls.Wake()
    for times in (1, 100_000, 2):
        for _ in range(times):
            wake.set()
        assert select.select([wake], [], [], 0)[0]
        wake.clear()
        assert not select.select([wake], [], [], 0)[0]
    for _ in range(2):
        wake.close()
    assert wake.fileno() == -1


def test_processors_and_limits_where_the_system_does_not_tell() -> None:
    code = """
import os, resource
from ring_notebook.machine.os_calls import processors, resource_limits, set_resource_limits
set_resource_limits(resource.RLIMIT_NOFILE, 5, 5)
print(len(processors()) == os.cpu_count(), resource_limits(resource.RLIMIT_NOFILE) == (resource.RLIM_INFINITY,) * 2)
"""
    assert refused("sched_getaffinity,prlimit64,getrlimit", code, 38) == "True True"


def test_numbers_of_files_that_are_missing_or_hold_words(tmp_path: Path) -> None:
    (tmp_path / "number").write_text("7\n")
    (tmp_path / "word").write_text("max\n")
    assert [os_calls.number_in(tmp_path / name) for name in ("number", "word", "none")] == [7, None, None]


def test_what_tells_a_namespace() -> None:
    assert os_calls.namespace("net") == os.readlink("/proc/self/ns/net")
    assert os_calls.namespace("none") == ""


def test_the_core_has_memory_where_the_calls_for_it_are_refused() -> None:
    code = """
from ring_notebook import _core
ring_memory = _core.RingMemory.create(0, 1, 1 << 28)
print(len(memoryview(ring_memory.allocate(1 << 20))))
"""
    assert refused("pidfd_open,memfd_create,fallocate", code) == str(1 << 20)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_user_of_a_connection_is_known_while_it_is_open(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        there = server.getsockname()[:2]
        with socket.create_connection(there) as client:
            here = client.getsockname()[:2]
            assert os_calls.user_at(here, there) == os.geteuid()
            assert os_calls.user_at(here, (host, there[1] + 1)) is None
        assert os_calls.user_at(here, there) is None
    with pytest.raises(OSError, match="illegal IP"):
        os_calls.user_at(("nowhere", 1), there)


@pytest.mark.parametrize("length", [1, 107, 200])
def test_a_socket_file_whose_path_is_too_long_for_an_address(tmp_path: Path, length: int) -> None:
    path = tmp_path / ("f" * length) / "socket"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        with os_calls.short_path(path) as name:
            server.bind(name)
        server.listen()
        with os_calls.short_path(path) as name:
            client.connect(name)
        assert path.is_socket()


@pytest.mark.parametrize("names", ["", "epoll_create1"])
def test_a_message_over_tcp_comes_that_nobody_has_asked_for(names: str) -> None:
    code = """
import socket
from ring_notebook import _core
links = _core.TcpLink(2), _core.TcpLink(2)
for rank, end in enumerate(socket.socketpair()):
    links[rank].connected(1 - rank, end.detach())
links[0].post(1, _core.TcpLink.first_free_tag, b"news")
print(links[1].take(_core.TcpLink.first_free_tag))
"""
    assert refused(names, code) == "(0, b'news')"
