"""Slurm, PBS and LSF: how each submits, queries and cancels a job, and its states and reasons in words."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Literal

from ring_notebook.launch.launchers.hosts import expand_names
from ring_notebook.launch.supervisor.inherited_variables import for_batch_system

_SECONDS_TO_ANSWER = 5.0
_SECONDS_TO_TEST = 3.0  # a hint is not worth more
_SECONDS_TO_SUBMIT = 120.0  # a busy batch system lets users wait


class BatchError(Exception):
    """A batch system has rejected a job, or its commands do not run; says what to do."""


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of a job. Times are seconds since the epoch, None if unknown.

    ``word`` and ``reason`` are the batch system's own words; ``start`` is estimated while the job waits.
    """

    phase: Literal["waits", "runs", "ended"]
    word: str
    reason: str = ""
    start: float | None = None
    end: float | None = None
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchSystem:
    """The commands of one batch system. ``query`` and ``cancel`` are followed by the number of a job.

    ``accepted`` matches the number of a job in the output of ``submit``, ``unknown`` the message that the job is not
    known any more. ``read`` parses the output of ``query``; None if it cannot. ``requeue``: the options against and for
    a second start of a job that lost a host. ``members`` lists hosts that run jobs. ``test`` tells when a script on
    standard input would start. ``quote_path`` quotes any path for a line of options in a script; empty where there is
    no safe way.
    """

    name: str
    submit: tuple[str, ...]
    query: tuple[str, ...]
    cancel: tuple[str, ...]
    queues: tuple[str, ...]
    members: tuple[str, ...]
    release: str
    accepted: str
    unknown: str
    requeue: tuple[str, str]
    read: Callable[[str], JobState | None]
    reasons: Mapping[str, str]
    reads_input: bool = False
    """Whether the script comes over standard input."""
    test: tuple[str, ...] = ()
    quote_path: Callable[[str], str] = lambda _path: ""

    def submit_script(self, script: str) -> str:
        """Submit the file ``script``; returns the number of the job. Raises BatchError when it is rejected.

        The job gets no secrets of this process's environment.
        """
        if self.reads_input:
            with open(script) as file:
                done = ask(self.submit, _SECONDS_TO_SUBMIT, file, for_batch_system(os.environ))
        else:
            done = ask([*self.submit, script], _SECONDS_TO_SUBMIT, env=for_batch_system(os.environ))
        if done is None:
            why = "does not answer" if shutil.which(self.submit[0]) else "is not on the PATH of this host"
            raise BatchError(f"{self.submit[0]}, which submits jobs to {self.name}, {why}")
        found = re.search(self.accepted, done.stdout)
        if done.returncode == 0 and found:
            return found[1]
        raise BatchError(f"{self.name} has rejected the job: {_last_words(done)}{self._queues()}")

    def _queues(self) -> str:
        done = ask(self.queues)
        table = re.split(r"^-[- ]*$", done.stdout if done else "", flags=re.MULTILINE)[-1]  # below its header
        names = sorted({line.split()[0] for line in table.splitlines() if line.strip()})
        return f". Its queues: {', '.join(names)}" if names else ""

    def state(self, job: str) -> JobState | None:
        """The state of a job now; None where the batch system does not answer."""
        done = ask([*self.query, job])
        if done is None:
            return None
        if re.search(self.unknown, done.stderr + done.stdout):
            return JobState("ended", "GONE")
        with suppress(ValueError, LookupError, TypeError):
            return self.read(done.stdout)
        return None

    def end(self, job: str) -> bool:
        """Cancel a job. Returns whether the batch system accepted that, or does not know the job."""
        done = ask([*self.cancel, job], _SECONDS_TO_SUBMIT)
        return done is not None and (done.returncode == 0 or bool(re.search(self.unknown, done.stderr + done.stdout)))

    def why_it_waits(self, job: str, state: JobState) -> str:
        """In words: why a job waits, and when it should start."""
        reason = next((words for word, words in self.reasons.items() if re.match(word, state.reason)), state.reason)
        said = (reason or "it is in the queue").format(release=f"`{self.release} {job}`", reason=state.reason)
        return f"{said}; it should start at {clock(state.start)}" if (state.start or 0) > time.time() else said

    def starts(self, script: str) -> float | None:
        """When a job ``script`` would start, in seconds since the epoch; None if unknown. Submits nothing."""
        if not self.test:
            return None
        with tempfile.TemporaryFile("w+") as file:
            file.write(script)
            file.seek(0)
            done = ask(self.test, _SECONDS_TO_TEST, file, for_batch_system(os.environ))
        found = re.search(r"to start at (\d+)", done.stderr) if done else None
        return float(found[1]) if found else None


def clock(at: float | None) -> str:
    """A time within 12 hours as ``14:05``, a later one with its day."""
    near = (at or 0.0) < time.time() + 12 * 3600
    return time.strftime("%H:%M" if near else "%a %H:%M", time.localtime(at))


def login_node_of(env: Mapping[str, str] = os.environ) -> BatchSystem | None:
    """The batch system whose login node this host is, if any.

    On a login node the batch system answers, but this process is in no job and the host runs no jobs.
    """
    here = socket.gethostname().split(".")[0]
    if any(env.get(name) for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")):
        return None
    for system in SYSTEMS.values():
        done = ask(system.members)
        if done is not None and done.returncode == 0 and done.stdout.strip():
            return None if here in {name.split(".")[0] for name in done.stdout.split()} else system
    return None


def _slurm(output: str) -> JobState | None:
    word, reason, start, end, nodes = output.partition("\n")[0].strip().split("|")
    phase: Literal["waits", "runs", "ended"] = "ended"
    if word in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"):
        phase = "waits"
    elif word in ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"):
        phase = "runs"
    return JobState(phase, word, reason, _number(start), _number(end), tuple(expand_names(nodes)))


def _quote_for_slurm(path: str) -> str:
    """A backslash protects any character, and two percent signs stand for one."""
    return re.sub(r"([^\w@+=./%-])", r"\\\1", path).replace("%", "%%")


def _pbs(output: str) -> JobState | None:
    (job,) = json.loads(output)["Jobs"].values()
    word = job["job_state"]
    estimated = (job.get("estimated") or {}).get("start_time", "")
    with suppress(ValueError, TypeError):
        estimated = time.mktime(time.strptime(estimated))
    hosts = [part.split("/")[0] for part in job.get("exec_host", "").split("+") if part]
    phase: Literal["waits", "runs", "ended"] = "runs" if word in "RSU" else "ended" if word in "EFX" else "waits"
    start = job.get("stime") if phase != "waits" else estimated
    with suppress(ValueError, TypeError):
        start = time.mktime(time.strptime(str(start)))
    reason = "held" if word == "H" else str(job.get("comment", ""))
    return JobState(phase, word, reason, start if isinstance(start, float) else None, None, tuple(Counter(hosts)))


def _lsf(output: str) -> JobState | None:
    word, reason, hosts = output.strip().split("|")
    names = [part.rpartition("*")[2] for part in hosts.split(":") if part not in ("", "-")]
    phase: Literal["waits", "runs", "ended"] = "ended"
    if word in ("PEND", "PSUSP", "WAIT", "PROV"):
        phase = "waits"
    elif word in ("RUN", "USUSP", "SSUSP"):
        phase = "runs"
    reason = "held" if word == "PSUSP" else reason.strip(" -;")
    return JobState(phase, word, reason, hosts=tuple(Counter(names)))


def _number(text: str) -> float | None:
    return float(text) if text.strip().isdigit() else None


def ask(
    command: Sequence[str],
    seconds: float = _SECONDS_TO_ANSWER,
    stdin: IO[str] | int = subprocess.DEVNULL,
    env: Mapping[str, str] = os.environ,
) -> subprocess.CompletedProcess[str] | None:
    """Run a command of a batch system; None where it does not exist or does not answer."""
    try:
        return subprocess.run(
            command,
            env={**env, "SLURM_TIME_FORMAT": "%s"},
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr.strip() or done.stdout.strip() or "it says no reason").splitlines()
    return re.sub(r"^(sbatch: )?(error: )?(Batch job submission failed: )?", "", lines[-1]).rstrip(".")


_NEVER = "it asks for more than the queue may give, and will never start as it is ({reason})"
_LIMIT = "a limit of your account or of the queue is reached ({reason})"

SLURM = BatchSystem(
    name="Slurm",
    submit=("sbatch", "--parsable"),
    query=("squeue", "--noheader", "--states=all", "--format=%T|%r|%S|%e|%N", "--jobs"),
    cancel=("scancel",),
    queues=("sinfo", "--noheader", "--format=%R"),
    members=("sinfo", "--noheader", "--Node", "--format=%n %N"),
    release="scontrol release",
    accepted=r"^(\d+)",
    unknown="Invalid job id",
    requeue=("--no-requeue", "--requeue"),
    read=_slurm,
    test=("sbatch", "--test-only"),
    quote_path=_quote_for_slurm,
    reasons={
        "None$|Cleaning": "it has not been looked at yet",
        "Resources$|Nodes": "no hosts are free",
        "Priority$": "jobs with a higher priority come first",
        "Dependency": "it waits for another job ({reason})",
        "BeginTime": "its time to begin has not come; a job that was put back into the queue waits for two minutes",
        "JobHeldUser|JobHeldAdmin|JobHold|.*[Hh]eld": "it is held ({reason}); {release} lets it start",
        "Partition(Config|TimeLimit|NodeLimit)|BadConstraints|AssocMaxWallDurationPerJobLimit|QOSMaxWall": _NEVER,
        "ReqNodeNotAvail|Reservation": "hosts that it needs are down or reserved ({reason})",
        "PartitionDown|PartitionInactive": "its queue is closed ({reason})",
        "QOS|Assoc": _LIMIT,
    },
)
PBS = BatchSystem(
    name="PBS",
    submit=("qsub",),
    query=("qstat", "-x", "-f", "-F", "json"),
    cancel=("qdel",),
    queues=("qstat", "-Q"),
    members=("sh", "-c", "pbsnodes -a | sed -n 's/^\\([^ ].*\\)/\\1/p'"),
    release="qrls",
    accepted=r"^(\d+[^\s]*)",
    unknown="Unknown Job|has finished|Job has finished",
    requeue=("-r n", "-r y"),
    read=_pbs,
    reasons={
        "held": "it is held; {release} lets it start",
        ".*([Ii]nsufficient|[Nn]ot enough)": "no hosts are free ({reason})",
        ".*limit": _LIMIT,
    },
)
LSF = BatchSystem(
    name="LSF",
    submit=("bsub",),
    query=("bjobs", "-noheader", "-o", "stat pend_reason exec_host delimiter='|'"),
    cancel=("bkill",),
    queues=("bqueues", "-noheader", "-o", "queue_name"),
    members=("bhosts", "-noheader", "-o", "host_name"),
    release="bresume",
    accepted=r"Job <(\d+)>",
    unknown="is not found|already finished",
    requeue=("-rn", "-r"),
    read=_lsf,
    reads_input=True,
    reasons={
        "held": "it is held; {release} lets it start",
        ".*(slot|resource|host)": "no hosts are free ({reason})",
        ".*limit": _LIMIT,
    },
)
SYSTEMS = {"slurm": SLURM, "pbs": PBS, "lsf": LSF}
"""By the names that users type."""
