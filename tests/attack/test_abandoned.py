"""What killed jobs leave in /dev/shm and in /tmp goes with the next job, and nothing else does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.waiting import LIMIT, until
from ring_notebook.files.claimed_folders import claimed_folder
from ring_notebook.launch.connections import mpi_host
from ring_notebook.launch.connections.mpi_host import claim_folder, remove_abandoned
from ring_notebook.launch.connections.pmi import shared_memory_prefixes
from ring_notebook.launch.launchers.find_launcher import find_launcher

RINGRUN = [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix"]
JOB = "ring-{}-0123456789abcdef"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mpi_host, "FOLDER", tmp_path)
    return tmp_path


def names() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.mark.slow
@pytest.mark.skipif(type(find_launcher()).__name__ != "Own", reason="MPICH's wheel has names in /dev/shm")
def test_the_names_of_a_job_that_was_killed_with_its_cleaner() -> None:
    program = "from mpi4py import MPI; import os, time; os.write(1, b'ready\\n'); time.sleep(600)"
    before = names()
    with subprocess.Popen([*RINGRUN, "-np", "2", "python", "-c", program], stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        for _ in range(2):
            assert job.stdout.readline() == b"ready\n"
        (supervisor,) = psutil.Process(job.pid).children()
        (cleaner,) = [child for child in supervisor.children() if child.cmdline() == supervisor.cmdline()]
        ranks = [child for child in supervisor.children() if child != cleaner]
        for process in (cleaner, supervisor):
            process.send_signal(signal.SIGKILL)
        assert job.wait(LIMIT) != 0
    assert psutil.wait_procs(ranks, timeout=LIMIT)[1] == []
    left = names() - before
    assert any(name.startswith("ring-") for name in left), "the attack did nothing"
    assert any(name.startswith("mpich_") for name in left), "the attack did nothing"
    subprocess.run([*RINGRUN, "-np", "1", "true"], timeout=LIMIT, check=True)
    assert names() - before == set()


@pytest.mark.skipif(type(find_launcher()).__name__ != "Own", reason="MPICH's wheel has names in /dev/shm")
def test_a_job_that_ends_well_after_its_cleaner_was_killed() -> None:
    before = names()
    program = "from mpi4py import MPI; print('ready', flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([*RINGRUN, "-np", "1", "python", "-c", program], stdin=pipe, stdout=pipe) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        assert job.stdout.readline() == b"ready\n"
        (supervisor,) = psutil.Process(job.pid).children()
        (cleaner,) = [child for child in supervisor.children() if child.cmdline() == supervisor.cmdline()]
        cleaner.send_signal(signal.SIGKILL)
        job.stdin.write(b"\n")
        job.stdin.close()
        assert job.wait(LIMIT) == 0
    assert names() - before == set()


def test_an_abandoned_folder_is_removed_though_its_process_id_is_in_use(folder: Path) -> None:
    job = JOB.format(os.getpid())
    (folder / job / "ucx").mkdir(parents=True)
    for prefix in shared_memory_prefixes(job):
        (folder / f"{prefix}0").touch()
    (folder / "mpich_shm_abc_0").touch()  # of a job that is not known to be over
    remove_abandoned()
    assert [path.name for path in folder.iterdir()] == ["mpich_shm_abc_0"]


def test_a_claimed_folder_stays_though_its_maker_has_ended(folder: Path) -> None:
    """Also for as long as a child has it, as the cleaner does, and for a process id of another container."""
    claim = claim_folder(JOB.format(4_000_000))
    pid = os.fork()
    if pid == 0:
        signal.pause()
    os.close(claim)
    remove_abandoned()
    assert len(list(folder.iterdir())) == 1
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    remove_abandoned()
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="makes folders of another user")
def test_nothing_of_another_user_goes(folder: Path) -> None:
    foreign, planted = folder / JOB.format(1), folder / JOB.format(2)
    for path in (foreign, planted):
        path.mkdir()
    file = folder / f"{shared_memory_prefixes(planted.name)[0]}0"
    file.touch()
    os.chown(foreign, 65534, 65534)
    os.chown(file, 65534, 65534)
    remove_abandoned()
    assert sorted(folder.iterdir()) == sorted([foreign, file])


def test_links_and_names_that_are_none_of_ours_stay(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("target")
    (target / "kept").touch()
    (folder / JOB.format(1)).symlink_to(target)
    for name in ("ring-1", "ring-1-0123", "ring-x-0123456789abcdef", "ring-1-0123456789abcdef-2"):
        (folder / name).mkdir()
    (folder / JOB.format(2)).touch()
    before = sorted(folder.iterdir())
    remove_abandoned()
    assert sorted(folder.iterdir()) == before
    assert (target / "kept").exists()


def test_a_claim_never_loses_its_folder(folder: Path) -> None:
    """While another job of the user looks for what is abandoned, at every moment of the claim."""
    over = threading.Event()
    looks = 0

    def look() -> None:
        nonlocal looks
        while not over.is_set():
            remove_abandoned()
            looks += 1

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for _ in range(300):
            claim = claim_folder(JOB.format(3))
            assert (folder / JOB.format(3)).is_dir()
            os.close(claim)
    finally:
        over.set()
        looker.join()
    assert looks > 0


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files are made; its path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def test_the_folder_of_a_run_that_was_killed(place: Path) -> None:
    """Its ranks end with it; the next one removes what it could not."""
    waits = "import ring_notebook, time\nring_notebook.run(time.sleep, (600,), n=1)"
    with subprocess.Popen([sys.executable, "-c", waits], env={**os.environ, "TMPDIR": str(place)}) as caller:
        until(lambda: [path.name for path in place.glob("ring-run-*/*")] == ["inbox"])
        (left,) = place.iterdir()
        with claimed_folder("code") as other:
            assert sorted(place.iterdir()) == sorted([left, other]), "one in use stays"
        assert list(place.iterdir()) == [left]
        caller.kill()
    assert list(place.iterdir()) == [left], "the attack did nothing"

    def removed() -> bool:  # not while a process that it was about to start has not closed what it inherited
        with claimed_folder("run") as own:
            assert own.stat().st_mode & 0o777 == 0o700
            return list(place.iterdir()) == [own]

    until(removed)
    assert list(place.iterdir()) == []


def test_other_temporary_folders_stay(place: Path, tmp_path: Path) -> None:
    (place / "ring-run-abcd1234").mkdir()  # an earlier version has no claim on its own
    (place / "ring-run-0123456789abcdef").symlink_to(tmp_path)
    (place / "ring-code-0123456789abcdef").touch()
    (tmp_path / "kept").touch()
    before = sorted(place.iterdir())
    with claimed_folder("code"):
        assert set(before) < set(place.iterdir())
    assert sorted(place.iterdir()) == before
    assert (tmp_path / "kept").exists()


def test_a_folder_in_use_where_locks_are_refused_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as in a sandbox that shares the folder with processes that have locks."""
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lambda *_: os.close(-1))
        without = claimed_folder("run")
        path = without.__enter__()
    with claimed_folder("run"):
        assert path.is_dir()
    without.__exit__(None, None, None)
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a folder of another user")
def test_a_temporary_folder_of_another_user_stays(place: Path) -> None:
    foreign = place / "ring-run-0123456789abcdef"
    foreign.mkdir()
    os.chown(foreign, 65534, 65534)
    with claimed_folder("run"):
        assert foreign.is_dir()


@pytest.mark.parametrize("rounds", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_folders_that_turn_into_links_while_they_are_removed(
    rounds: int, folder: Path, place: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What the links lead to stays, however often another thread swaps them."""
    target = tmp_path_factory.mktemp("target")
    for path in (target / "kept", target / "sub" / "kept"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    before = sorted(target.rglob("*"))
    swapped = [place / "ring-run-0123456789abcdef", folder / JOB.format(1), folder / JOB.format(2)]
    over = threading.Event()
    swaps = 0

    def swap() -> None:
        nonlocal swaps
        while not over.is_set():
            for path in swapped:
                with contextlib.suppress(OSError):  # it has just been removed
                    if path.is_symlink():
                        path.unlink()
                        (path / "sub").mkdir(parents=True)
                        (path / "sub" / "kept").touch()
                    else:
                        path.rename(folder / f"away-{swaps}")
                with contextlib.suppress(OSError):
                    path.symlink_to(target)
                swaps += 1

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        for _ in range(rounds):
            with claimed_folder("run"):
                remove_abandoned()
    finally:
        over.set()
        swapper.join()
    assert sorted(target.rglob("*")) == before
    assert swaps > 0
