"""A batch job that holds the hosts of a cluster: submitted, followed, and cancelled when the engines are idle."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from socket import gethostname
from threading import Event, Thread, current_thread
from typing import Any

from ring_notebook.analysis.job_failure import judge_batch_job
from ring_notebook.errors import ClusterError, RingError
from ring_notebook.files.private_files import is_own, make_private_folder, open_private
from ring_notebook.files.run_folders import runs_directory
from ring_notebook.launch import own_batch_job
from ring_notebook.launch.batch_commands import SLURM, JobState, clock
from ring_notebook.launch.job_script import BatchRequest
from ring_notebook.launch.launchers.hosts import Host
from ring_notebook.machine.own_python import module_command
from ring_notebook.machine.process_life import began, is_alive
from ring_notebook.notebook.cluster import cluster_folders
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.record.run_files import notebook, read_json, read_text, write_json
from ring_notebook.notebook.style import duration
from ring_notebook.text.words import plural

HOLD = ("sleep", "infinity")
"""The command of a job that only holds its hosts."""
_ABOUT = "about.json"
_PERIOD = 1.0
_PERIODS_OF_QUERIES = ((60.0, 2.0), (600.0, 5.0), (float("inf"), 10.0))  # (until seconds of waiting, seconds between)
_LOOK = 0.5  # seconds between checks of the job's output file
_SECONDS_SOONER = 60.0  # a smaller request that starts this much sooner is worth a hint
_SECONDS_TO_END = 5.0
_LAST_LINES = 5  # of the job's output


class BatchJob:
    """A job that holds hosts; its script and what it writes are in ``folder``.

    It is cancelled when this process ends in any way; with ``keep`` it stays, and `left_behind` finds it.
    """

    def __init__(self, folder: Path, request: BatchRequest, keep: bool, about: dict[str, Any]) -> None:
        self.folder = folder
        self.request = request
        self.keep = keep
        self.times: dict[str, float] = about.get("times", {})
        """``idle`` and ``before_end`` of `BatchCluster`."""
        self.busy: float = about.get("busy", 0.0)
        """Seconds in which its ranks executed cells."""
        self.cluster: str = about.get("cluster", "")
        """The name of the folder of the cluster that runs in it."""
        self.number = ""
        self.sooner = ""
        """Which smaller requests would have started sooner, as a sentence."""
        self.kept_before = False
        """Whether an earlier kernel has submitted it."""
        self._guard: subprocess.Popen[str] | None = None

    @classmethod
    def submit(cls, request: BatchRequest, keep: bool, **times: float) -> BatchJob:
        """Submit a job. Raises ClusterError when the batch system rejects it."""
        cluster_folders.check_folder()
        folder = _root() / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        make_private_folder(folder)
        job = cls(folder, request, keep, {"times": times})
        try:
            with open_private(folder / "job.sh", "w") as file:
                file.write(job.script())
            job.describe()
            job.sooner = job._sooner()  # before submission: later estimates would count this job too
            job._submit()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return job

    def script(self) -> str:
        """The script of the job, which only holds its hosts."""
        return self.request.script(HOLD, self.folder / "output")

    def _submit(self) -> None:
        arguments = str(os.getpid()), self.request.system, str(self.folder), str(int(self.keep))
        # In its own session: signals to the kernel's process group must not reach it.
        guard = self._guard = subprocess.Popen(
            module_command("ring_notebook.launch.submit_and_cancel", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert guard.stdin is not None
        assert guard.stdout is not None
        try:
            answer = guard.stdout.readline().strip()
        except BaseException:  # an interrupt: this cancels a job that was submitted
            guard.stdin.close()
            raise
        if read_text(self.folder / "job") != answer and guard.wait() != 0:
            raise ClusterError(answer or "the program that submits jobs exited without output")
        self.number = answer

    @classmethod
    def left_behind(cls) -> BatchJob | None:
        """The newest job that an earlier kernel of this notebook kept; None without one.

        Files of jobs that have ended with their kernels are removed.
        """
        found = []
        for folder in _folders():
            with suppress(OSError, ValueError, TypeError, KeyError):
                about = read_json(folder / _ABOUT)
                job = cls(folder, BatchRequest(**about["request"]), True, about)
                job.kept_before = True
                if not is_own(folder) or is_alive(about["kernel"], about["began"]):
                    continue
                if not about["keep"]:
                    if about["host"] == gethostname():  # processes of other login nodes cannot be checked
                        job.forget()
                    continue
                job.number = read_text(folder / "job")
                if job.number and about["notebook"] in ("", notebook()):
                    found.append((float(about["submitted"]), job))
        for _, job in sorted(found, key=lambda one: -one[0]):
            state = job.state()
            if state is None or state.phase != "ended":
                return job
            job.forget()
        return None

    def describe(self) -> None:
        """Write down what another kernel needs to follow this job; it is this kernel's from now on."""
        kernel = {"kernel": os.getpid(), "began": began(os.getpid()), "host": gethostname()}
        kernel["notebook"] = notebook()
        submitted = read_json(self.folder / _ABOUT).get("submitted", time.time())
        own = {"request": asdict(self.request), "keep": self.keep, "times": self.times, "busy": self.busy}
        own["cluster"] = self.cluster
        with suppress(OSError):  # removed by somebody: nobody will attach to it
            write_json(self.folder / _ABOUT, {**own, **kernel, "submitted": submitted})

    @property
    def name(self) -> str:
        """Such as ``Slurm job 17``."""
        return f"{self.request.batch_system.name} job {self.number}"

    def state(self) -> JobState | None:
        """The job's state from the batch system; None if it does not answer."""
        return self.request.batch_system.state(self.number)

    def _sooner(self) -> str:
        """Which smaller requests would start sooner than this job, as a sentence; empty if unknown."""
        system, now = self.request.batch_system, time.time()
        start = system.starts(self.script())
        if start is None or start < now + _SECONDS_SOONER:
            return ""
        starts = {
            options: system.starts(less.script(HOLD, self.folder / "output"))
            for options, less in self.request.smaller().items()
        }
        found = [
            f"`{options}` {f'at {clock(at)}' if at > now + _SECONDS_SOONER else 'at once'}"
            for options, at in starts.items()
            if at is not None and at < start - _SECONDS_SOONER
        ]
        return f" Less would have started sooner: {', '.join(found)}." if found else ""

    def cancel(self) -> None:
        """Cancel the job in any state. Raises ClusterError if the batch system does not confirm it."""
        ended = self.request.batch_system.end(self.number)
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()  # the guard cancels too, and tries for longer
            if ended:
                self._guard.kill()
                self._guard.wait()
        if not ended:
            command = " ".join([*self.request.batch_system.cancel, self.number])
            raise ClusterError(f"{self.name} may still be there: {command} does not answer; try it again")
        self.forget()

    def forget(self) -> None:
        """Remove its files."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def output_time(self) -> int:
        """When its output file last changed; 0 without one. Most batch systems create it when the job starts."""
        with suppress(OSError):
            return (self.folder / "output").stat().st_mtime_ns
        return 0

    def output(self) -> str:
        """The last lines that the job has written."""
        return "\n".join(read_text(self.folder / "output").strip().splitlines()[-_LAST_LINES:])


def _folders() -> list[Path]:
    with suppress(OSError):  # another user owns the parent folder and denies access
        return list(_root().glob("*-*"))
    return []


def _root() -> Path:
    return runs_directory().parent / "jobs"


class BatchCluster:
    """Follows a job in a thread: starts the engines when it runs, and again after it was requeued.

    ``use`` gets the cluster when its engines run, and None when they are lost. ``tell`` gets sentences for the user.
    ``busy`` says whether a cell runs or waits; ``release`` is called after ``idle`` seconds without one, and when the
    job ends. ``before_end`` seconds before the time limit the ranks write a checkpoint. Then, and before an idle
    cluster is released, ``keep`` keeps their variables and returns what to tell.
    """

    def __init__(
        self,
        job: BatchJob,
        *,
        use: Callable[[Cluster | None], None],
        tell: Callable[[str], None],
        busy: Callable[[], bool],
        release: Callable[[str], None],
        keep: Callable[[str], str],
        idle: float = 0.0,
        before_end: float = 300.0,
    ) -> None:
        self.job = job
        self.line = f"{job.name} was submitted." if not job.kept_before else f"{job.name} was kept."
        """The state of the job, as a sentence."""
        self._use, self._tell, self._busy, self._release = use, tell, busy, release
        self._keep = keep
        self._idle, self._before_end = idle, before_end
        self._began: float | None = None
        self._asks_again = False  # when it began
        self._closed = Event()
        self._cluster: Cluster | None = None
        self._thread = Thread(target=self._follow, name="ring-batch-job", daemon=True)

    def begin(self, cluster: Cluster | None = None) -> None:
        """Begin to follow the job, in which ``cluster`` runs already, if there is one."""
        self._cluster = cluster
        if cluster is not None:
            self._ask_when_it_began()
        self._thread.start()

    def _ask_when_it_began(self) -> None:
        state = self.job.state()
        self._asks_again = state is None
        self._began = state.start if state else None

    def close(self) -> str:
        """Cancel the job, and return what it has used. Call it when its engines have ended."""
        self._closed.set()
        if current_thread() is not self._thread:
            self._thread.join(_SECONDS_TO_END)
        own_batch_job.leave()
        self.job.cancel()
        return self.usage()

    def usage(self) -> str:
        """How many GPU hours, else CPU hours, the job has had, and how many of them were idle; empty before it ran."""
        if self._began is None:
            return ""
        request = self.job.request
        seconds = time.time() - self._began
        count, what = (request.gpus * request.hosts, "GPU") if request.gpus else (request.n, "CPU")
        used, idle = count * seconds / 3600, count * max(0.0, seconds - self.job.busy) / 3600
        usage = f"{plural(count, what)} for {duration(seconds)}: {used:.2f} {what} hours, {idle:.2f} of them idle"
        return f" It had {usage}."

    def chosen(self, n: int | None, ranks: Any) -> Any:
        """The ranks that a cell will run on. Raises ClusterError for more than the job has."""
        wanted = range(self.job.request.n if n is None else n) if ranks is None else ranks
        if max(wanted) >= self.job.request.n:
            raise ClusterError(f"{self.job.name} has {plural(self.job.request.n, 'rank')}, got rank {max(wanted)}")
        return wanted

    def _say(self, line: str) -> None:
        if line != self.line:
            self.line = line
            self._tell(line)

    def _follow(self) -> None:
        try:
            while not self._closed.is_set():
                if self._cluster is None:
                    self._wait_for_hosts()
                else:
                    self._watch(self._cluster)
        except Exception as error:  # the thread has no caller to report it
            self._end(f"{self.job.name}: {error}")

    def _end(self, line: str) -> None:
        if not self._closed.is_set():
            self._release(line)

    def _wait_for_hosts(self) -> None:
        """Return when the engines run, or never will."""
        since = time.monotonic()
        while not self._closed.is_set():
            before = self.job.output_time
            state = self.job.state()
            if state is None:
                self._say(f"{self.job.name}: {self.job.request.batch_system.name} does not answer; asking again.")
            elif state.phase == "waits":
                why = self.job.request.batch_system.why_it_waits(self.job.number, state)
                self._say(f"{self.job.name} waits: {why}.{self.job.sooner}")
            elif state.phase == "runs" and state.hosts:
                self._start(state)
                return
            elif state.phase == "ended" and state.word != "COMPLETING":  # which a requeued job passes through
                wrote = self.job.output()
                why = judge_batch_job(self.job.name, state.word, state.reason, ())
                self._end(f"{why or f'{self.job.name} has ended'}.{f' It wrote: {wrote}' if wrote else ''}")
                return
            now = time.monotonic()
            until = now + next(period for until, period in _PERIODS_OF_QUERIES if now - since < until)
            while time.monotonic() < until and self.job.output_time == before and not self._closed.wait(_LOOK):
                pass

    def _start(self, state: JobState) -> None:
        request = self.job.request
        self._say(f"{self.job.name} runs on {', '.join(state.hosts[:4])}: starting {plural(request.n, 'engine')}.")
        self._began = self._began or state.start or time.time()
        cluster = join(self.job, state)
        try:
            cluster.start()
        except RingError as error:
            again = self.job.state()
            if self._closed.is_set() or (again is not None and again.phase == "waits"):
                return
            ended = own_batch_job.who_ended_it()
            self._end(f"{ended}." if ended else f"{self.job.name} was cancelled, as its engines did not start: {error}")
            return
        if self._closed.is_set():
            cluster.stop()
            return
        self.job.cluster = cluster.directory.name
        self.job.describe()
        self._cluster = cluster
        self._say(
            f"Started {plural(cluster.n, 'engine')} in {self.job.name} on {', '.join(state.hosts[:4])} in "
            f"{cluster.seconds_to_start:.1f} s."
        )
        self._use(cluster)

    def _watch(self, cluster: Cluster) -> None:
        """Return when the cluster has ended, or is to end."""
        last = asked_at = time.monotonic()
        idle_since, was_busy, asked = last, False, False
        while not self._closed.wait(_PERIOD):
            now = time.monotonic()
            if busy := self._busy():
                self.job.busy += now - last
                idle_since = now
            if was_busy and not busy:
                self.job.describe()
            was_busy, last = busy, now
            if cluster.death is not None:
                self._see_what_ended(cluster)
                return
            if self._asks_again and now - asked_at >= _PERIODS_OF_QUERIES[-1][1]:
                asked_at = now
                self._ask_when_it_began()
            limit = self._began + self.job.request.seconds if self._began else None
            end = own_batch_job.walltime().end or limit
            if end and not asked and end - time.time() <= self._before_end:
                asked = True
                with suppress(ClusterError):
                    cluster.write_checkpoint()
                self._tell(f"{self.job.name} ends soon. {self._keep('walltime')}")
            if self._idle and now - idle_since >= self._idle:
                kept = self._keep("idle")
                why = f"no cell has run for {duration(self._idle)}"
                self._end(f"Released the hosts of {self.job.name}: {why}. {kept}")
                return

    def _see_what_ended(self, cluster: Cluster) -> None:
        """Find out whether the job has ended, was requeued, or its engines died by themselves."""
        reason = str(cluster.death)
        deadline = time.monotonic() + _SECONDS_TO_END
        while not self._closed.wait(_PERIOD):
            state = self.job.state()
            if state is None or state.word == "COMPLETING":
                continue
            if state.phase == "waits":
                break
            if state.phase == "ended":
                self._end(reason.split("\n")[0])
                return
            if time.monotonic() > deadline:  # they died by themselves: `%ring restart` starts new ones in the same job
                self._say(reason)
                while not self._closed.wait(_PERIOD) and not cluster.running:
                    pass
                return
        own_batch_job.leave()
        cluster.stop()
        self._cluster = None
        self._use(None)


def join(job: BatchJob, state: JobState) -> Cluster:
    """A cluster on the hosts of a running job, not started yet. This process belongs to the job from now on."""
    request = job.request
    hosts = [Host(name, request.per_host) for name in state.hosts]
    for name, value in request.environment.items():
        os.environ.setdefault(name, value)
    if request.batch_system is SLURM:
        own_batch_job.enter(job.number, hosts)
        return Cluster(request.n, keep=job.keep)
    return Cluster(request.n, ",".join(map(str, hosts)), keep=job.keep)


def running_in(job: BatchJob) -> Cluster | None:
    """The cluster of a job that an earlier kernel kept. This process belongs to the job from now on."""
    state = job.state()
    if job.cluster and state is not None and state.phase == "runs":
        join(job, state)
        with suppress(ClusterError):  # its engines have ended, as when the login node goes down: new ones start
            return Cluster.attach(job.cluster.split("-")[1])
    return None
