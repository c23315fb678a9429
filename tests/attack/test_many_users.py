"""Kernels of several users, one after another on one machine: none meets another, and none leaves anything."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.programs import ran
from harness.waiting import LIMIT

KERNELS = 8
USERS = (61_481, 61_482, 61_483, 61_484)
ENDS = ("stopped", "closed", "killed")
"""Of one that is killed, as front ends do with one that takes long to close, the folder with the logs of its cluster
stays until the next one starts there."""
PROGRAM = Path(__file__).with_name("kernel_of_user.py")
# The interpreter may lie below the closed home of root. Who can read everything meets others the sooner.
READS = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]


def as_user(user: int) -> list[str]:
    return ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", *READS]


def owner_of(path: str) -> int | None:
    """None for what has gone meanwhile: all users of the machine work in these folders."""
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_uid
    return None


def left_by(user: int) -> list[str]:
    """Processes of a user, and what it owns where all users write."""
    found = []
    for process in psutil.process_iter(["uids", "cmdline"]):
        if process.info["uids"] and process.info["uids"].real == user:
            found.append(" ".join(process.info["cmdline"] or ["?"]))
    for shared in ("/tmp", "/dev/shm", "/run/user"):
        if os.path.isdir(shared):
            own = [path for path in (f"{shared}/{name}" for name in os.listdir(shared)) if owner_of(path) == user]
            # Not ours: Jupyter's file with the sockets of a kernel that took long to close, the folder of the sockets
            # themselves, which this test's own kernels have, and torch's cache folder. `clusters_of` has those.
            others = ("/tmp/kernel-", "/tmp/torchinductor_", "/tmp/ring-notebook-")
            found += [path for path in own if not path.endswith(".json") and not path.startswith(others)]
    return found


def clusters_of(user: int) -> list[str]:
    return list(map(str, Path(f"/tmp/ring-notebook-{user}").glob("*/*")))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that all users may enter; each session of pytest closes those of the sessions before."""
    with tempfile.TemporaryDirectory(prefix="users-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_kernels_of_four_users_one_after_another(open_folder: Path, without_torch: None) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED with kernels of several users: needs root")
    if subprocess.run([*as_user(USERS[0]), sys.executable, "-c", ""], check=False).returncode:
        pytest.skip("NOT TESTED with kernels of several users: another user cannot run this Python")
    homes = {user: open_folder / str(user) for user in USERS}
    for user, home in homes.items():
        home.mkdir(mode=0o700)
        os.chown(home, user, user)
        shutil.rmtree(f"/tmp/ring-notebook-{user}", ignore_errors=True)  # of a run of this test that did not end
    for number in range(KERNELS):
        user = USERS[number % len(USERS)]
        kept = ("PATH", "PYTHONPATH", "LANG")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join([str(PROGRAM.parents[1]), environment.get("PYTHONPATH", "")])
        environment |= {"HOME": str(homes[user]), "PYTHONDONTWRITEBYTECODE": "1", "USER": str(user)}
        how = "stopped" if number >= KERNELS - len(USERS) else ENDS[number % len(ENDS)]
        done = ran([*as_user(user), sys.executable, str(PROGRAM), how], cwd=homes[user], env=environment, timeout=250)
        assert done.returncode == 0, (number, user, done.stdout, done.stderr)
        met, attached, said = json.loads(done.stdout.splitlines()[-1])
        assert met == "", (number, user)
        assert "no cluster of this folder is running" in attached, (number, user)
        assert said.count(f"size 2 users {{{user}}}") in (1, 2), said  # equal lines of all ranks may be shown once
        deadline = time.monotonic() + LIMIT
        while (left := left_by(user) + clusters_of(user)[how != "stopped" :]) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == [], (number, user, how)
