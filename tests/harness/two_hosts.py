"""Two hosts on one machine: network namespaces joined by a link of known rate, each with its own name and /dev/shm.

namespace PREFIX-a               namespace PREFIX-b
hostname ring-a, 10.77.0.1  ---- hostname ring-b, 10.77.0.2     veth pair, tbf limits each direction

More hosts are joined by a bridge, in a namespace of its own; tbf limits what each of them sends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from harness.leftovers import TOKEN
from harness.programs import executable, ran
from harness.waiting import until
from ring_notebook.launch.launchers.find_launcher import find_launcher
from ring_notebook.launch.launchers.hosts import Host
from ring_notebook.launch.supervisor.forked_rank import ADDRESS

__all__ = ["ALLOCATION", "NAMES", "TwoHosts", "commands", "hosts_or_skip", "missing", "pids_in", "two_hosts"]

NAMES = ("ring-a", "ring-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
ADDRESS_6 = "fd77::{}"
"""Of IPv6, which a test may give to the hosts."""
ALLOCATION = {"SLURM_JOB_NODELIST": "ring-a,ring-b", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "17"}
"""The variables that Slurm gives to a job with both hosts and two slots on each."""
# mpiexec calls this instead of ssh: `-x HOST COMMAND...` runs COMMAND in the namespaces of HOST, which exist as long as
# the process in HOST.pid. The environment is already that of mpiexec, and the hosts share the disk.
_LAUNCHER = """\
    #!/bin/sh
    while [ "${1#-}" != "$1" ]; do shift; done
    host=$1; shift
    case $host in
      %(cases)s
      *) echo "no such host: $host" >&2; exit 255 ;;
    esac
    if [ -e %(folder)s/$name.pid ]; then
      exec nsenter --target "$(cat %(folder)s/$name.pid)" --net --uts --mount sh -c \
        'cd "$1" && shift && exec sh -c "$*"' sh "$PWD" "$@"
    fi
    exec ip netns exec "$space" unshare --uts --mount sh -c '
      hostname "$0" && mount -t tmpfs shm /dev/shm && mount --bind "$1" /etc/hosts && shift && exec sh -c "$*"
    ' "$name" %(hosts)s "$@"
"""


def missing() -> str:
    """Why two hosts cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = [tool for tool in ("ip", "tc", "unshare", "ssh", "sshd") if shutil.which(tool) is None]
    if tools:
        return f"{', '.join(tools)} missing; `make test-deps` installs them"
    trial = ran(["unshare", "--net", "--uts", "--mount", "true"])
    return f"this machine allows no namespaces: {trial.stderr.strip()}" if trial.returncode else ""


@dataclass(frozen=True)
class TwoHosts:
    """The hosts while they exist."""

    prefix: str
    folder: Path
    names: tuple[str, ...] = NAMES

    @property
    def launcher_flags(self) -> list[str]:
        """Options with which mpiexec reaches the hosts."""
        launcher = str(self.folder / "launcher")
        if "MPICH" in find_launcher().mpis:
            return ["-launcher", "ssh", "-launcher-exec", launcher]
        return ["--prtemca", "plm_ssh_agent", launcher]

    @property
    def remote_shell(self) -> str:
        """A real ssh that reaches the hosts."""
        return f"ssh -F {self.folder / 'ssh_config'}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which any launcher reaches the hosts, from any process."""
        launcher = str(self.folder / "launcher")
        if "MPICH" in find_launcher().mpis:
            mpiexec = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": launcher}
        else:
            mpiexec = {"PRTE_MCA_plm_ssh_agent": launcher}
        return {**mpiexec, "RING_REMOTE_SHELL": self.remote_shell}

    def run(self, program: Sequence[str], per_host: int | tuple[int, int] = 1) -> str:
        """Run a Python program (its arguments) on ``per_host`` ranks of each host; returns its output."""
        counts = (per_host, per_host) if isinstance(per_host, int) else per_host
        where = [Host(name, count) for name, count in zip(NAMES, counts, strict=True)]
        launcher = find_launcher()
        flags = self.launcher_flags if launcher.foreign else []
        command = launcher.command([sys.executable, *program], sum(counts), where, flags)
        return self.on_first(command)

    def on_first(
        self, command: Sequence[str], timeout: float = 200, environment: Mapping[str, str] | None = None
    ) -> str:
        """Run ``command`` on the first host, with ``environment`` added, and return what it printed.

        Raises AssertionError with its output when it fails, and subprocess.TimeoutExpired.
        """
        done = subprocess.run(
            [str(self.folder / "launcher"), NAMES[0], shlex.join(command)],
            # Otherwise MPICH's UCX bypasses the link, and the ranks are not really on two hosts.
            env={**os.environ, **self.environment, **(environment or {}), "UCX_TLS": "tcp,self"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def start(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start ``command`` on the first host, with ``environment`` added. A signal to the process reaches it."""
        return subprocess.Popen(
            [str(self.folder / "launcher"), NAMES[0], f"exec {shlex.join(command)}"],
            env={**os.environ, **self.environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def processes(self) -> list[str]:
        """The command lines of all processes on the hosts that a test has started.

        An sshd's connection to a host that has vanished lasts until TCP gives it up.
        """
        ours = ("sshd: ", "sleep infinity", f"{sys.executable} -c from harness.forked_ranks")
        return [one for one in commands(self.pids()) if not one.startswith(ours) and "fork_server" not in one]

    def pids(self) -> list[int]:
        """All processes on the hosts."""
        return [pid for name in self.names for pid in pids_in(f"{self.prefix}-{name[-1]}")]

    def set_link(self, host: int, state: Literal["up", "down"]) -> None:
        """Take the link of ``host`` (0 for the first) away, or bring it back."""
        _ip("-n", f"{self.prefix}-{self.names[host][-1]}", "link", "set", "link0", state)

    def revive(self, name: str) -> None:
        """Restore a host's link and ssh server, if they are gone; returns when the others reach it."""
        space = f"{self.prefix}-{name[-1]}"
        if any(command.startswith("sshd: /") for command in commands(pids_in(space))):
            return
        _ip("-n", space, "link", "set", "link0", "up")
        (self.folder / f"{name}.pid").unlink()
        _boot(self.folder, name)
        address = f"10.77.0.{1 + self.names.index(name)}"
        for other in self.names:
            connects = ["ip", "netns", "exec", f"{self.prefix}-{other[-1]}", "ssh-keyscan", "-T", "1", address]
            until(lambda command=connects: ran(command).stdout)

    @contextlib.contextmanager
    def limited(self, host: int, rate: str) -> Iterator[None]:
        """In the block ``host`` (0 or 1) sends at another rate."""
        space = f"{self.prefix}-{'ab'[host]}"
        _limit(space, rate)
        try:
            yield
        finally:
            _limit(space, "1gbit")

    def bytes_sent(self, host: int) -> int:
        """Bytes that have left ``host`` (0 or 1) over the link so far."""
        return int(_link(f"{self.prefix}-{'ab'[host]}")["stats64"]["tx"]["bytes"])


def commands(pids: Sequence[int]) -> list[str]:
    """The command lines of processes that have not ended yet."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return found


def hosts_or_skip(count: int = 2) -> Iterator[TwoHosts]:
    """For fixtures: hosts joined by a link of 1 Gbit/s. Skips, and says why, where a machine allows none."""
    if reason := missing():
        pytest.skip(f"NOT TESTED on two hosts: {reason}")
    with two_hosts("1gbit", count) as made:
        yield made


@contextlib.contextmanager
def two_hosts(rate: str = "1gbit", count: int = 2) -> Iterator[TwoHosts]:
    """Make ``count`` hosts, up to 16, with links of ``rate`` (in the notation of ``tc``), and always remove them."""
    prefix = f"ring-{uuid.uuid4().hex[:8]}"
    folder = Path(tempfile.mkdtemp(prefix="two-hosts-"))
    letters = "abcdefghijklmnop"[:count]
    names = tuple(f"ring-{letter}" for letter in letters)
    addresses = [f"10.77.0.{number}" for number in range(1, count + 1)]
    spaces = [f"{prefix}-{letter}" for letter in letters]
    switch = f"{prefix}-switch"
    try:
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(map("{} {}\n".format, addresses, names)))
        cases = "\n".join(
            f"{name}|{address}) name={name}; space={space} ;;"
            for name, address, space in zip(names, addresses, spaces, strict=True)
        )
        text = textwrap.dedent(_LAUNCHER) % {"cases": cases, "hosts": folder / "hosts", "folder": folder}
        executable(folder / "launcher", text)
        for space in spaces:
            _ip("netns", "add", space)
        if count == 2:
            _pair(spaces[0], spaces[1], "link0")
        else:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "name", "bridge0", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge0", "up")
            for letter, space in zip(letters, spaces, strict=True):
                _pair(space, switch, f"port-{letter}")
                _ip("-n", switch, "link", "set", f"port-{letter}", "master", "bridge0", "up")
        for space, address in zip(spaces, addresses, strict=True):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "link0")
            _ip("-n", space, "link", "set", "link0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _limit(space, rate)
        _write_ssh_files(folder, names)
        for name in names:
            _boot(folder, name)
        until(lambda: all(_link(space)["operstate"] == "UP" for space in spaces))
        yield TwoHosts(prefix, folder, names)
    finally:
        for space in (*spaces, switch):
            _end_all(space)  # processes left behind after a time limit
            subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(folder)


def _limit(space: str, rate: str) -> None:
    limit = ["tbf", "rate", rate, "burst", "256k", "latency", "50ms"]
    subprocess.run(["tc", "-n", space, "qdisc", "replace", "dev", "link0", "root", *limit], check=True)


def _boot(folder: Path, name: str) -> None:
    """Start the ssh server of a host, and the process that keeps its namespaces."""
    sshd = f"{shutil.which('sshd')} -f {folder / 'sshd_config'}"
    keep = f"sleep infinity </dev/null >/dev/null 2>&1 & echo $! > {folder / name}.pid"
    environment = {key: value for key, value in os.environ.items() if key != TOKEN}  # no leftover of a file of tests
    subprocess.run([str(folder / "launcher"), name, f"{sshd} && {keep}"], env=environment, check=True)


def _pair(space: str, other: str, name: str) -> None:
    """Join ``link0`` of one namespace to ``name`` of the other."""
    ends = ["netns", space, "type", "veth", "peer", "name", name, "netns", other]
    _ip("link", "add", "name", "link0", *ends)


def _write_ssh_files(folder: Path, names: Sequence[str]) -> None:
    """Keys and configurations of the hosts' ssh servers, and of clients that reach them."""
    for key in ("host_key", "user_key"):
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(keygen, check=True)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd requires it
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nUsePAM no\n"
        f"PermitRootLogin prohibit-password\nPidFile none\nMaxStartups 100\nAcceptEnv {ADDRESS}\n"
    )
    (folder / "known_hosts").write_text(
        f"{','.join(names)},{ADDRESS_6.format('?')} {(folder / 'host_key.pub').read_text()}"
    )
    (folder / "ssh_config").write_text(
        f"BatchMode yes\nConnectTimeout 20\nIdentityFile {folder}/user_key\nUserKnownHostsFile {folder}/known_hosts\n"
        f"SendEnv {ADDRESS}\n"
    )


def _end_all(space: str) -> None:
    """Kill all processes in a namespace of ours."""
    for pid in pids_in(space):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pids_in(space: str) -> list[int]:
    """All processes in a network namespace."""
    listed = ran(["ip", "netns", "pids", space])
    return [int(pid) for pid in listed.stdout.split()]


def _link(space: str) -> dict[str, Any]:
    show = ["ip", "-json", "-stats", "-n", space, "link", "show", "link0"]
    links: list[dict[str, Any]] = json.loads(subprocess.run(show, capture_output=True, check=True).stdout)
    return links[0]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
