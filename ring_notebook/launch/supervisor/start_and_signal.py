"""The process of one rank: started in a group of its own, signaled as by a terminal, ended with its children."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from ring_notebook.analysis.job_failure import judge_late_rank
from ring_notebook.launch.supervisor.forked_rank import ForkedRank
from ring_notebook.launch.supervisor.parent_death import bind_to_parent
from ring_notebook.launch.supervisor.start_errors import NoProgramError
from ring_notebook.launch.supervisor.tagged_output import outlet
from ring_notebook.machine.os_calls import set_resource_limits
from ring_notebook.rank.rank_status import RankStatus

FORWARDED = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT),
)
"""Signals that are passed on to the program."""
_TO_ALL = (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)
"""Signals that the program's children get too: the terminal's, and SIGKILL, which cannot be passed on."""


def start_rank(
    program: Sequence[str],
    environment: Mapping[str, str],
    stdin: int | None,
    descriptors: Sequence[int],
    *,
    close_fds: bool = True,
    files: tuple[int, int] | None = None,
    waiting: Callable[[], None] = lambda: None,
) -> subprocess.Popen[bytes]:
    """Start ``program``, which inherits ``descriptors``, with pipes for `carry`. It is killed when this process dies.

    ``files`` are its limits of open files. ``waiting`` is called twice a second while a fork server is not ready.
    Raises NoProgramError when the program is the reason, OSError else.
    """
    if close_fds:
        limits = {} if files is None else {resource.RLIMIT_NOFILE: files}
        forked = ForkedRank.start(program, environment, (stdin, outlet(1), outlet(2)), descriptors, limits, waiting)
        if forked is not None:
            return forked
    parent = os.getpid()

    def in_rank() -> None:
        os.setpgid(0, 0)
        bind_to_parent(parent, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        if files is not None:
            set_resource_limits(resource.RLIMIT_NOFILE, *files)

    try:
        return subprocess.Popen(
            program,
            env=environment,
            stdin=stdin,
            stdout=outlet(1),
            stderr=outlet(2),
            pass_fds=descriptors,
            close_fds=close_fds,
            preexec_fn=in_rank,
        )
    except OSError as error:
        if error.filename == program[0]:
            raise NoProgramError(*error.args) from error
        raise


def send_signal(process: subprocess.Popen[bytes], signum: int) -> None:
    """Send a signal to the program; Ctrl-C, Ctrl-Z and SIGKILL reach its children too.

    The others do not: what the program has started need not know SIGUSR1, and SIGTERM is the program's to handle.

    A program that has exited is not waited for here, as Popen's own method does: this may be called from a signal
    handler at any moment, and its process id must stay its own until `carry` and all others who need it have used it.
    """
    if process.returncode is not None:
        return
    if signum == signal.SIGTSTP:  # which does not stop a group without a shell
        signum = signal.SIGSTOP
    with contextlib.suppress(ProcessLookupError):
        if signum in _TO_ALL:
            os.killpg(process.pid, signum)
        else:
            os.kill(process.pid, signum)


def end_if_late(process: subprocess.Popen[bytes], status: RankStatus) -> bool:
    """End a rank that waits for the others in exit handlers after a failure. Returns whether it was told to end."""
    signum = judge_late_rank(status.times.get("raised", status.times.get("aborted")), time.monotonic())
    if signum:
        send_signal(process, signum)
    return signum != 0


def end_children(group: int) -> None:
    """Send SIGTERM to what the program with process id ``group``, which has exited, leaves behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)


def has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


def end_session(session: int) -> None:
    """Kill every process of ``session``, which has a process group for each rank."""
    for _ in range(2):  # a second time for what was started meanwhile
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.getsid(int(name)) == session:
                    os.kill(int(name), signal.SIGKILL)
