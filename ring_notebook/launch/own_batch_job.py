"""The batch job that this process runs in: its time limit, and who ended it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from threading import Event, Thread

from ring_notebook.analysis.job_failure import judge_batch_job
from ring_notebook.analysis.time_limits import WALLTIME_WARNING
from ring_notebook.launch.batch_commands import SLURM, ask
from ring_notebook.launch.launchers.hosts import Host, expand_names

_SECONDS_UNTIL_ASKED_AGAIN = 300.0  # when the job ends: its limit may be changed
_SECONDS_AFTER_SILENCE = 60.0  # until a batch system that did not answer is asked again
_LOST = ("down", "fail", "unknown", "error", "not_responding")
_ended: dict[str, str] = {}  # why each ended job ended, by `job_name`


def job_name() -> str:
    """Such as ``Slurm job 17``; empty outside of a Slurm job: PBS and LSF are not asked."""
    number = os.environ.get("SLURM_JOB_ID")
    return f"Slurm job {number}" if number else ""


def who_ended_it() -> str:
    """Who or what has ended the batch job of this process, as a sentence, and what to do.

    Empty while the job runs, outside of one, and where the batch system does not answer.
    """
    name = job_name()
    if name and name not in _ended:
        state = SLURM.state(os.environ["SLURM_JOB_ID"])
        lost = _lost_hosts() if state and state.word != "RUNNING" else []
        if state is None or not (why := judge_batch_job(name, state.word, state.reason, lost)):
            return ""
        _ended[name] = why
    return _ended.get(name, "")


class Walltime:
    """Follows in a thread how long the batch job of this process may still run, and calls ``warn`` before its end.

    The batch system is asked at the start, and every five minutes: a limit may be changed. While it does not answer,
    the last known end counts.
    """

    def __init__(self) -> None:
        self.end: float | None = None
        """In seconds since the epoch, once it is known."""
        self.warn: Callable[[str], object] = lambda _text: None
        self._stop = Event()
        if job := os.environ.get("SLURM_JOB_ID"):
            Thread(target=self._follow, args=(job,), name="ring-walltime", daemon=True).start()

    @property
    def left(self) -> float | None:
        """Seconds; None if unknown."""
        return None if self.end is None else max(0.0, self.end - time.time())

    def close(self) -> None:
        self._stop.set()

    def _follow(self, job: str) -> None:
        warned = False
        while not self._stop.is_set():
            state = SLURM.state(job)
            if state is not None:
                self.end = state.end
                if state.end is None:  # the job has no limit, or has ended
                    return
            pause = _SECONDS_AFTER_SILENCE if state is None else _SECONDS_UNTIL_ASKED_AGAIN
            if (left := self.left) is not None:
                if left <= WALLTIME_WARNING and not warned and not self._stop.is_set():
                    warned = True
                    self.warn(f"Slurm job {job} reaches its time limit in {left:.0f} s; save what you need")
                until = left - WALLTIME_WARNING
                pause = min(pause, until) if until > 0 else pause
            self._stop.wait(pause)


@cache
def walltime() -> Walltime:
    """The `Walltime` of this process's job, followed from the first call on."""
    return Walltime()


def enter(job: str, hosts: Sequence[Host]) -> None:
    """Put this process of a login node into Slurm's ``job``: what it starts on ``hosts`` then runs in that job."""
    leave()
    os.environ["SLURM_JOB_ID"] = job
    os.environ["SLURM_JOB_NODELIST"] = ",".join(host.name for host in hosts)
    os.environ["SLURM_TASKS_PER_NODE"] = ",".join(str(host.slots) for host in hosts)


def leave() -> None:
    """Leave the job of `enter`, and forget its state."""
    walltime().close()
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"):
        os.environ.pop(name, None)
    walltime.cache_clear()
    _ended.clear()


def _lost_hosts() -> list[str]:
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    done = ask(["sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N|%T"]) if nodes else None
    found = dict(line.strip().split("|") for line in done.stdout.splitlines() if "|" in line) if done else {}
    # A star behind the state: the host does not answer.
    return [name for name in expand_names(nodes) if found.get(name, "").startswith(_LOST) or "*" in found.get(name, "")]
