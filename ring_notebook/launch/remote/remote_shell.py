"""The command that starts the agent on another host, how its streams are protected, and with which environment."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from ring_notebook.analysis.time_limits import SECONDS_OF_SSH
from ring_notebook.config import config
from ring_notebook.launch.remote.peer_certificate import Way
from ring_notebook.launch.supervisor.inherited_variables import for_batch_system
from ring_notebook.machine.own_python import module_command

# Without a terminal to ask for a password.
_SSH = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={SECONDS_OF_SSH:.0f}"]
# A step of its own that leaves all cores and GPUs of the host to the ranks. Its ranks are ours, not Slurm's.
_SRUN = ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--mpi=none", "--cpu-bind=none", "--disable-status"]
_AGENT = "ring_notebook.launch.remote.agent"
_RELAY = "ring_notebook.launch.remote.relay"
"""A remote shell of ours, which encrypts what it carries."""
_OF_BATCH_SYSTEMS = (("LSB_JOBID", "blaunch"), ("PBS_JOBID", "pbs_tmrsh"))
"""Variables that tell a batch system, and its program that takes the place of ssh within an allocation."""


def ssh_command(port: int | None = None, identity: str | None = None) -> list[str]:
    """The ssh that starts agents, with a port and a private key of the user's; the host follows it."""
    return [*_SSH, *(["-p", str(port)] if port else []), *(["-i", identity] if identity else [])]


def agent_command(host: str, module: str = _AGENT) -> list[str]:
    """How to start the agent, or another ``module``, on ``host``. Its argument is the `Way` of its streams.

    Secrets are on no command line: environment, program and input follow over the agent's standard input.
    """
    return command_on(host, module_command(module, way_to()))


def command_on(host: str, command: Sequence[str]) -> list[str]:
    """How to start ``command`` on ``host``: by RING_REMOTE_SHELL, a batch system's own program in its job, else ssh."""
    shell = _shell()
    # All but srun hand one string to a shell.
    words = command if shell == _SRUN else [shlex.quote(word) for word in command]
    return [*shell, *([f"--nodelist={host}"] if shell == _SRUN else [host]), *words]


def is_relay(command: Sequence[str]) -> bool:
    """Whether ``command`` reaches a place that an engine has lent."""
    return _RELAY in command


def way_to() -> Way:
    """How the streams of what `command_on` starts are protected."""
    shell = _shell()
    if Path(shell[0]).name == "ssh" or is_relay(shell):
        return "plain"
    return "stream" if config().remote_shell else "batch"


def shell_environment() -> dict[str, str]:
    """The environment of the process that `command_on` describes."""
    return for_batch_system(os.environ) if way_to() == "batch" else dict(os.environ)


def _shell() -> list[str]:
    """The program that starts others on other hosts, with its options."""
    if config().remote_shell:
        return shlex.split(config().remote_shell)
    if os.environ.get("SLURM_JOB_ID") and shutil.which("srun"):
        return _SRUN
    for variable, program in _OF_BATCH_SYSTEMS:
        if os.environ.get(variable) and shutil.which(program):
            return [program]
    return ssh_command()
