"""A real Slurm over the two hosts of `two_hosts`, with its own munged, slurmctld and a slurmd on each host."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import two_hosts as hosts_of_this_machine
from harness.two_hosts import NAMES, TwoHosts, two_hosts

__all__ = ["Slurm", "missing", "slurm"]

_PROGRAMS = ("munged", "slurmctld", "slurmd", "salloc", "srun", "sinfo", "squeue", "scancel")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_SECONDS_TO_START = 60.0
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
NodeName=ring-a NodeAddr=10.77.0.1 CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=ring-b NodeAddr=10.77.0.2 CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""

# Like the launcher of the hosts. /sys must show the network of the host, and the control groups that slurmd needs.
_IN_NAMESPACE = (
    "hostname {host} && mount -t tmpfs shm /dev/shm && mount --bind {names} /etc/hosts && "
    "mount --rbind /sys/fs/cgroup {folder}/cgroup && mount -t sysfs sys /sys && "
    "mount --rbind {folder}/cgroup /sys/fs/cgroup && exec {command}"
)


def missing() -> str:
    """Why no Slurm can be started here; empty when it can."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"{', '.join(absent)} missing; on Debian `apt-get install slurm-wlm munge` installs them"
    return hosts_of_this_machine.missing()


@dataclass(frozen=True)
class Slurm:
    """The batch system while it runs."""

    hosts: TwoHosts
    folder: Path

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command on the first host, where users log in."""
        launcher = str(self.hosts.folder / "launcher")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RING_", "SLURM_"))}
        environment |= {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _PATH, "UCX_TLS": "tcp,self"}
        return subprocess.Popen(
            [launcher, NAMES[0], f"exec {shlex.join(command)}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: Sequence[str], timeout: float = 200) -> tuple[int, str]:
        """Run a command on the first host; its exit code and what it printed. Ends it after ``timeout`` seconds."""
        process = self.start(command)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, output

    def python(self, *arguments: str, tasks: int = 4, program: Sequence[str] = ()) -> list[str]:
        """The command that runs ``program``, by default this Python, in an allocation of both hosts."""
        return ["salloc", "--quiet", "--nodes=2", f"--ntasks={tasks}", *(program or [sys.executable]), *arguments]

    def submit(self, script: Path, output: Path, *options: str) -> str:
        """Submit a job on both hosts whose output goes to a file; its number."""
        where = ["--nodes=2", "--ntasks=4", f"--output={output}", *options]
        code, said = self.run(["sbatch", "--parsable", *where, str(script)])
        assert code == 0, said
        return said.strip()

    def is_up(self) -> bool:
        """Whether both hosts wait for jobs."""
        return self.run(["sinfo", "--noheader", "--format=%T %D"])[1].split() == ["idle", "2"]

    def left(self) -> list[str]:
        """Processes on the hosts other than Slurm's daemons, and jobs that Slurm still lists."""
        jobs = self.run(["squeue", "--noheader"])[1].split("\n")
        daemons = ("munged", "slurmctld", "slurmd ", "slurmscriptd")
        running = [command for command in self.hosts.processes() if command.strip()]
        return [one for one in [*jobs, *running] if one.strip() and not any(name in one for name in daemons)]

    def wait_until_nothing_is_left(self, seconds: float = 60) -> None:
        """Return when `left` is empty. Raises AssertionError with its content after ``seconds``."""
        deadline = time.monotonic() + seconds
        while left := self.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.2)


@contextlib.contextmanager
def slurm() -> Iterator[Slurm]:
    """Start Slurm, and end all of it in any case."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    daemons: list[subprocess.Popen[bytes]] = []
    with two_hosts() as hosts, (folder / "log").open("wb") as log:
        system = Slurm(hosts, folder)
        configuration = folder / "slurm.conf"
        configuration.write_text(_CONFIGURATION.format(folder=folder))
        for name in ("state", "cgroup"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o400)

        def start(host: str, *command: str) -> None:
            space = f"/run/netns/{hosts.prefix}-{host[-1]}"
            shell = _IN_NAMESPACE.format(
                host=host, names=hosts.folder / "hosts", folder=folder, command=shlex.join(command)
            )
            daemons.append(
                subprocess.Popen(
                    ["nsenter", f"--net={space}", "unshare", "--uts", "--mount", "sh", "-c", shell],
                    env={**os.environ, "PATH": _PATH},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

        try:
            files = [f"--{name}={folder}/munge.{name[:3]}" for name in ("pid-file", "log-file", "seed-file")]
            start(NAMES[0], "munged", "-F", "-f", f"--key-file={key}", f"--socket={folder}/munge.socket", *files)
            start(NAMES[0], "slurmctld", "-D", "-f", str(configuration))
            for name in NAMES:
                start(name, "slurmd", "-D", "-f", str(configuration), "-N", name)
            deadline = time.monotonic() + _SECONDS_TO_START
            while not system.is_up():
                assert time.monotonic() < deadline, (folder / "log").read_text()[-4000:]
                time.sleep(0.3)
            yield system
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in reversed(daemons):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(10)
                daemon.kill()
                daemon.wait()
    shutil.rmtree(folder, ignore_errors=True)
