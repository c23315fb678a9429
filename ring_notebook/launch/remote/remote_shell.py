"""The command that starts the agent on another host."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence

from ring_notebook.config import config
from ring_notebook.own_python import module_command

# Without a terminal to ask for a password; a host that is down takes no longer than this, in seconds.
_SSH = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"]
# A step of its own that leaves all cores and GPUs of the host to the ranks. Its ranks are ours, not Slurm's.
_SRUN = ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--mpi=none", "--cpu-bind=none", "--disable-status"]
_AGENT = "ring_notebook.launch.remote.agent"
_OF_BATCH_SYSTEMS = (("LSB_JOBID", "blaunch"), ("PBS_JOBID", "pbs_tmrsh"))
"""Variables that tell a batch system, and its program that takes the place of ssh within an allocation."""


def ssh_command(port: int | None = None, identity: str | None = None) -> list[str]:
    """The ssh that starts agents, with a port and a private key of the user's; the host follows it."""
    return [*_SSH, *(["-p", str(port)] if port else []), *(["-i", identity] if identity else [])]


def agent_command(host: str, env: Mapping[str, str] = os.environ, module: str = _AGENT) -> list[str]:
    """How to start the agent, or another ``module``, on ``host``.

    Secrets are on no command line: environment, program and input follow over the agent's standard input.
    """
    return command_on(host, module_command(module), env)


def command_on(host: str, command: Sequence[str], env: Mapping[str, str] = os.environ) -> list[str]:
    """How to start ``command`` on ``host``: by RING_REMOTE_SHELL, a batch system's own program in its job, else ssh."""
    quoted = [shlex.quote(word) for word in command]  # ssh and its like hand one string to a shell
    if config().remote_shell:
        return [*shlex.split(config().remote_shell), host, *quoted]
    if env.get("SLURM_JOB_ID") and shutil.which("srun"):
        return [*_SRUN, f"--nodelist={host}", *command]
    for variable, program in _OF_BATCH_SYSTEMS:
        if env.get(variable) and shutil.which(program):
            return [program, host, *quoted]
    return [*ssh_command(), host, *quoted]
