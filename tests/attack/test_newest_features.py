"""Hostile names, a full process table and a second user, against notices, sync and torchrun."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from harness.waiting import LIMIT, until
from ring_notebook.errors import RingError
from ring_notebook.notebook.cluster.synced_folder import Synced, SyncedFolder
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.run.notifications import Notice, Notices, notify
from ring_notebook.rank import rendezvous, rendezvous_server

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")


def fork_as_nobody(body: Callable[[], Any]) -> int:
    """The process id of a child that does this as another user."""
    child = os.fork()
    if child == 0:
        try:
            os.setuid(NOBODY)
            body()
        finally:
            os._exit(0)
    return child


@as_root
def test_a_second_user_who_takes_the_name_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "squatted"}
    name = rendezvous._name_of_torchrun(job)
    ready, tell = os.pipe()

    def steal() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name[1:]}")
            listener.listen()
            os.write(tell, b".")
            for _ in range(2):
                with suppress(ConnectionError):  # the rank may have seen by now who answers
                    listener.accept()[0].send(b"x" * 100)

    thief = fork_as_nobody(steal)
    os.read(ready, 1)
    for rank in range(2):
        with pytest.raises(RingError, match=f"rank {rank} .*a process of another user has taken the name of the job"):
            rendezvous.Rendezvous.take({**job, "RANK": str(rank)})
    os.waitpid(thief, 0)
    os.close(ready)
    os.close(tell)


@as_root
def test_a_second_user_who_knocks() -> None:
    """It may know the name, which is no secret, and what is said there."""
    heard, tell = os.pipe()
    with rendezvous_server.RendezvousServer(2, f"@ring-test-{os.getpid()}", "s" * 32) as server:
        name = server.variables["RING_RENDEZVOUS"][1:]

        def knock() -> None:
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(f"\0{name}")
                try:
                    caller.send(b"cmd=ring_join value={}\n")
                    os.write(tell, b"heard %r" % caller.recv(100))
                except ConnectionError:
                    os.write(tell, b"heard b''")

        os.waitpid(fork_as_nobody(knock), 0)
    os.close(tell)
    assert os.read(heard, 100) == b"heard b''"
    os.close(heard)


@pytest.fixture
def run(tmp_path: Path) -> RunLog:
    """One that has lasted long."""
    log = RunLog(tmp_path / "r", "r", "digits", 1, "", {}, {}, started=time.time() - 100)
    log.finish("ok")
    return log


def test_a_notice_for_which_there_is_no_thread(
    run: RunLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As under `ulimit -u`. It ended the watch over the run, whose verdict was lost."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    notify(lambda _: None)
    monkeypatch.setattr(threading.Thread, "start", start)
    try:
        Notices(run).end("")
    finally:
        notify()
    assert capsys.readouterr().err == "notice of run r: it could not be given: RuntimeError: can't start new thread\n"


def test_a_callable_whose_name_raises(run: RunLog, capfd: pytest.CaptureFixture[str]) -> None:
    told = threading.Event()

    class Hostile:
        @property
        def __name__(self) -> str:
            raise ValueError("no name")

        def __call__(self, _: Notice) -> Any:
            told.set()
            raise KeyError("caf\udce9")

    notify(Hostile(), lab=False)
    try:
        Notices(run).end("")
        assert told.wait(LIMIT)
        # Not read before it is whole: what is written while it is read would be lost.
        until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("ring-notice")])
    finally:
        notify()
    assert capfd.readouterr().err == "notice of run r: Hostile raised KeyError: 'caf\\udce9'\n"


def test_what_in_a_folder_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """Who opens a named pipe waits for a writer, for ever."""
    os.mkfifo(tmp_path / "pipe.py")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s.json"))
        stamps, left_out = SyncedFolder(tmp_path)._scan()
    assert (stamps, left_out) == ({}, ("pipe.py (not a regular file)", "s.json (not a regular file)"))


@as_root
def test_a_file_that_the_user_may_not_read_is_named() -> None:
    """It was taken for equal on a host that has none."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        Path(name, "secret.json").write_text("{}")
        Path(name, "secret.json").chmod(0o600)
        source, sink = os.pipe()
        child = fork_as_nobody(lambda: os.write(sink, repr(SyncedFolder(Path(name))._scan()).encode()))
        os.waitpid(child, 0)
        said = os.read(source, 1000)
        os.close(source)
        os.close(sink)
    assert said == b"({}, ('secret.json (not readable)',))"


def test_names_that_are_no_utf_8_can_be_shown() -> None:
    name = os.fsdecode(b"caf\xe9.py")
    assert str(Synced((name,), left_out=(f"{name} (above 1 MiB)",))).encode().count(rb"caf\udce9.py") == 2
