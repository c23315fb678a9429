"""A real Slurm over the hosts of `two_hosts`, with its own munged, slurmctld and a slurmd on each host.

One more host, ring-login (10.77.0.200), runs no jobs. It has a link to each of the others.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from harness import two_hosts as hosts_of_this_machine
from harness.two_hosts import NAMES, TwoHosts, two_hosts
from harness.waiting import until

__all__ = ["LOGIN", "Slurm", "missing", "slurm"]

_PROGRAMS = ("munged", "slurmctld", "slurmd", "salloc", "srun", "sinfo", "squeue", "scancel")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_SECONDS_TO_START = 60.0
LOGIN = "ring-login"
LOGIN_ADDRESS = "10.77.0.200"
# It uses no plugin that a container lacks. Each host claims two cores, which jobs share.
_CONFIGURATION = """\
ClusterName=ring
SlurmctldHost=ring-a(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
SlurmdTimeout=20
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""
_NODE = "NodeName={name} NodeAddr=10.77.0.{number} CPUs=2 RealMemory=4000 State=UNKNOWN"

# Like the launcher of the hosts. /sys must show the network of the host, and the control groups that slurmd needs.
_IN_NAMESPACE = (
    "hostname {host} && mount -t tmpfs shm /dev/shm && mount --bind {names} /etc/hosts && "
    "mount --rbind /sys/fs/cgroup {folder}/cgroup && mount -t sysfs sys /sys && "
    "mount --rbind {folder}/cgroup /sys/fs/cgroup && exec {command}"
)

_ON_LOGIN = 'hostname {host} && mount -t tmpfs shm /dev/shm && mount --bind {names} /etc/hosts && exec sh -c "$0"'


def missing() -> str:
    """Why no Slurm can be started here; empty when it can."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"{', '.join(absent)} missing; on Debian `apt-get install slurm-wlm munge` installs them"
    return hosts_of_this_machine.missing()


@dataclass(frozen=True)
class Slurm:
    """The batch system while it runs. ``daemons``: its processes, in the order of their start."""

    hosts: TwoHosts
    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: Sequence[str], host: str = NAMES[0]) -> subprocess.Popen[str]:
        """Start a command on ``host``."""
        launcher = [str(self.hosts.folder / "launcher"), host]
        if host == LOGIN:
            shell = _ON_LOGIN.format(host=host, names=self.hosts.folder / "hosts")
            launcher = ["ip", "netns", "exec", _login(self.hosts), "unshare", "--uts", "--mount", "sh", "-c", shell]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RING_", "SLURM_"))}
        environment |= {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _PATH, "UCX_TLS": "tcp,self"}
        return subprocess.Popen(
            [*launcher, f"exec {shlex.join(command)}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: Sequence[str], timeout: float = 200, host: str = NAMES[0]) -> tuple[int, str]:
        """Run a command on ``host``; its exit code and what it printed. Ends it after ``timeout`` seconds."""
        process = self.start(command, host)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, output

    def python(self, *arguments: str, tasks: int = 4, program: Sequence[str] = ()) -> list[str]:
        """The command that runs ``program``, by default this Python, in an allocation of all hosts."""
        where = [f"--nodes={len(self.hosts.names)}", f"--ntasks={tasks}"]
        return ["salloc", "--quiet", *where, *(program or [sys.executable]), *arguments]

    def submit(self, script: Path, output: Path, *options: str) -> str:
        """Submit a job of 4 slots on all hosts whose output goes to a file; its number."""
        where = [f"--nodes={len(self.hosts.names)}", "--ntasks=4", f"--output={output}", *options]
        code, said = self.run(["sbatch", "--parsable", *where, str(script)])
        assert code == 0, said
        return said.strip()

    def is_up(self) -> bool:
        """Whether all hosts wait for jobs."""
        return self.run(["sinfo", "--noheader", "--format=%T %D"])[1].split() == ["idle", str(len(self.hosts.names))]

    def wait_until_up(self, seconds: float = 120) -> None:
        """Return when `is_up` holds. Raises AssertionError with what Slurm says of the hosts after ``seconds``."""
        until(self.is_up, seconds, lambda: self.run(["sinfo", "--Node", "--long"])[1] + self.log()[-4000:])

    def log(self) -> str:
        """What the daemons have said."""
        return (self.folder / "log").read_text(errors="replace")

    def start_daemon(self, host: str, *command: str) -> None:
        """Start one of Slurm's programs on ``host``."""
        shell = _IN_NAMESPACE.format(
            host=host, names=self.hosts.folder / "hosts", folder=self.folder, command=shlex.join(command)
        )
        space = f"/run/netns/{self.hosts.prefix}-{host[-1]}"
        with (self.folder / "log").open("ab") as log:
            self.daemons.append(
                subprocess.Popen(
                    ["nsenter", f"--net={space}", "unshare", "--uts", "--mount", "sh", "-c", shell],
                    env={**os.environ, "PATH": _PATH},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def start_slurmd(self, host: str) -> None:
        """Let ``host`` run jobs."""
        self.start_daemon(host, "slurmd", "-D", "-f", str(self.folder / "slurm.conf"), "-N", host)

    def kill_host(self, host: int, *, cut_first: bool) -> None:
        """End all processes of ``host`` (not the first one), with slurmd, and take its links away.

        ``cut_first``: the links go first, so no peer sees connections end, as after a power failure.
        """
        if cut_first:
            self.set_host(host, "down")
        for pid in hosts_of_this_machine.pids_in(f"{self.hosts.prefix}-{self.hosts.names[host][-1]}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.set_host(host, "down")

    def revive_host(self, host: int) -> None:
        """Start a killed host again; returns when Slurm may use it."""
        self.set_host(host, "up")
        self.hosts.revive(self.hosts.names[host])
        self.start_slurmd(self.hosts.names[host])
        self.wait_until_up()

    def left(self) -> list[str]:
        """Processes on the hosts other than Slurm's daemons, and jobs that Slurm still lists."""
        jobs = self.run(["squeue", "--noheader"])[1].split("\n")
        daemons = ("munged", "slurmctld", "slurmd ", "slurmscriptd")
        running = [command for command in self.hosts.processes() if command.strip()]
        running += hosts_of_this_machine.commands(hosts_of_this_machine.pids_in(_login(self.hosts)))
        return [one for one in [*jobs, *running] if one.strip() and not any(name in one for name in daemons)]

    def set_host(self, host: int, state: Literal["up", "down"]) -> None:
        """Take all links of ``host`` (0 for the first) away, or bring them back."""
        self.hosts.set_link(host, state)
        link = f"link-{self.hosts.names[host][-1]}"
        subprocess.run(["ip", "-n", _login(self.hosts), "link", "set", link, state], check=True)
        if state == "up":
            _route_to_login(self.hosts, host)

    def wait_until_nothing_is_left(self, seconds: float = 60) -> None:
        """Return when `left` is empty. Raises AssertionError with its content after ``seconds``."""
        until(lambda: not self.left(), seconds, self.left)


def _login(hosts: TwoHosts) -> str:
    """The namespace of the login host."""
    return f"{hosts.prefix}-l"


def _add_login(hosts: TwoHosts) -> None:
    space = _login(hosts)
    with (hosts.folder / "hosts").open("a") as names:
        names.write(f"{LOGIN_ADDRESS} {LOGIN}\n")
    subprocess.run(["ip", "netns", "add", space], check=True)
    subprocess.run(["ip", "-n", space, "link", "set", "lo", "up"], check=True)
    for index, host in enumerate(name[-1] for name in hosts.names):
        ends = ["name", f"link-{host}", "netns", space, "type", "veth", "peer", "name", "login", "netns"]
        subprocess.run(["ip", "link", "add", *ends, f"{hosts.prefix}-{host}"], check=True)
        subprocess.run(["ip", "-n", space, "addr", "add", f"{LOGIN_ADDRESS}/32", "dev", f"link-{host}"], check=True)
        subprocess.run(["ip", "-n", space, "link", "set", f"link-{host}", "up"], check=True)
        subprocess.run(["ip", "-n", f"{hosts.prefix}-{host}", "link", "set", "login", "up"], check=True)
        _route_to_login(hosts, index)


def _route_to_login(hosts: TwoHosts, host: int) -> None:
    """Set the routes that are lost when a link goes down."""
    letter = hosts.names[host][-1]
    to, back = f"10.77.0.{host + 1}/32", f"{hosts.prefix}-{letter}"
    way = ["route", "replace", to, "dev", f"link-{letter}", "src", LOGIN_ADDRESS]
    subprocess.run(["ip", "-n", _login(hosts), *way], check=True)
    subprocess.run(["ip", "-n", back, "route", "replace", f"{LOGIN_ADDRESS}/32", "dev", "login"], check=True)


@contextlib.contextmanager
def slurm(count: int = 2) -> Iterator[Slurm]:
    """Start Slurm on ``count`` hosts and a login node, and end all of it in any case."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    with two_hosts(count=count) as hosts:
        system = Slurm(hosts, folder)
        _add_login(hosts)
        configuration = folder / "slurm.conf"
        nodes = "\n".join(_NODE.format(name=name, number=number) for number, name in enumerate(hosts.names, 1))
        configuration.write_text(_CONFIGURATION.format(folder=folder, nodes=nodes))
        for name in ("state", "cgroup"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o400)
        try:
            files = [f"--{name}={folder}/munge.{name[:3]}" for name in ("pid-file", "log-file", "seed-file")]
            munge = ["munged", "-F", "-f", f"--key-file={key}", f"--socket={folder}/munge.socket", *files]
            system.start_daemon(NAMES[0], *munge)
            system.start_daemon(NAMES[0], "slurmctld", "-D", "-f", str(configuration))
            for name in hosts.names:
                system.start_slurmd(name)
            system.wait_until_up(_SECONDS_TO_START)
            yield system
        finally:
            for daemon in reversed(system.daemons):
                daemon.terminate()
            for daemon in reversed(system.daemons):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(10)
                daemon.kill()
                daemon.wait()
            for pid in hosts_of_this_machine.pids_in(_login(hosts)):
                os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", _login(hosts)], check=False)
    shutil.rmtree(folder, ignore_errors=True)
