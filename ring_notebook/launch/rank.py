"""What mpiexec starts in each rank's place: runs the program and reports how it ended.

``python -m ring_notebook.launch.rank PROGRAM ARGS...``; the report lets the job name who failed first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ring_notebook.hardware import oom_kills
from ring_notebook.launch.deathsig import bind_to_parent
from ring_notebook.launch.lines import carry, outlet
from ring_notebook.launch.refusal import refusal
from ring_notebook.rank_status import Life

__all__ = [
    "FORWARDED",
    "RankFailure",
    "describe_exit",
    "main",
    "rank_in",
    "report",
    "signal_name",
    "split_reports",
]

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that go to the program when whoever started it gets them."""
LINGER = 1.0
"""Seconds that others have to report, or to end with errors of their own, before MPI kills them because of this one."""

# A report is one line on stderr between two record separators, which programs may print too.
_REPORT = re.compile(rb"\x1e(\{[^\x1e\n]{,4096}\})\x1e\r?\n?")
_UNFINISHED = re.compile(rb"\x1e(\{[^\x1e\n]{,4096})?\Z")
_KINDS: dict[str, type | tuple[type, ...]] = {
    "rank": int,
    "host": str,
    "code": int,
    "time": (int, float),
    "out_of_memory": bool,
    "aborted": bool,
}


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank's program ended, when not well. ``code`` is negative for a signal, as in subprocess.

    It is 0 for a rank that ended in the middle of the job. ``out_of_memory`` says that its host has killed a process
    for want of memory meanwhile, ``aborted`` that it only ended because another rank did.
    """

    rank: int
    host: str
    code: int
    time: float
    out_of_memory: bool = False
    aborted: bool = False


def rank_in(env: Mapping[str, str] = os.environ) -> int:
    """The rank that mpiexec or a keeper gave to this process; 0 when neither started it."""
    for name in ("RING_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
        if env.get(name, "").isdigit():
            return int(env[name])
    return 0


def signal_name(number: int) -> str:
    """SIGKILL for 9, and so on."""
    try:
        return signal.Signals(number).name
    except ValueError:  # of the realtime signals only the first and the last have names
        above = number - signal.SIGRTMIN
        return f"SIGRTMIN+{above}" if above > 0 else f"signal {number}"


def describe_exit(code: int) -> str:
    """A subprocess return code in words."""
    if code >= 0:
        return f"exit code {code}"
    name = signal_name(-code)
    hint = "; a SIGKILL that nobody sent is most often the kernel's, out of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def split_reports(data: bytes) -> tuple[bytes, list[RankFailure], bytes]:
    """Stderr of a job as (what ranks wrote, reports in it, an unfinished report for the next call)."""
    text, failures, taken, at = b"", [], 0, 0
    while match := _REPORT.search(data, at):
        at = match.end(1)  # what ends here, and is no report, may be where one begins
        if failure := _failure_of(match[1]):
            text += data[taken : match.start()]
            failures.append(failure)
            taken = at = match.end()
    rest = _UNFINISHED.search(data, at)
    end = rest.start() if rest else len(data)
    return text + data[taken:end], failures, data[end:]


def _failure_of(body: bytes) -> RankFailure | None:
    """The failure that a report holds; None when a program has printed something that looks like one."""
    try:
        failure = RankFailure(**json.loads(body))
    except (ValueError, TypeError, RecursionError):
        return None
    return failure if all(isinstance(getattr(failure, name), kind) for name, kind in _KINDS.items()) else None


def report(failure: RankFailure) -> None:
    """Put ``failure`` into this process's stderr, where the job finds it."""
    sys.stderr.flush()
    os.write(2, b"\x1e" + json.dumps(asdict(failure)).encode() + b"\x1e\n")


def _leave_group(parent: int) -> None:
    # mpiexec signals whole process groups; in a group of its own the program gets each signal once, from us.
    os.setpgid(0, 0)
    bind_to_parent(parent, signal.SIGKILL)


def _hang_up(manager: int) -> None:
    """End the line to MPICH's process manager, where MPI has not, and let it end the other ranks and this one.

    It does so when the line ends and it does not know yet that this process has. When both happen at an exit it depends
    on luck which it sees first, and in the other order (MPICH 5.0) it leaves the others to wait for ever.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=manager) as line:
        try:
            over = line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            over = False
        # Not only closed: what the program has started may have the line too.
        line.shutdown(socket.SHUT_RDWR)
        if not over:
            time.sleep(LINGER)


def main() -> None:
    """Run the program of ``sys.argv``, hand signals on to it, and end as it ends."""
    parent = os.getpid()
    stopping = False
    oom_before = oom_kills()

    def hand_on(signum: int, _frame: object) -> None:
        nonlocal stopping
        stopping = stopping or signum not in (signal.SIGUSR1, signal.SIGUSR2)
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signum)

    child: subprocess.Popen[bytes] | None = None
    for signum in FORWARDED:
        signal.signal(signum, hand_on)
    life = Life()
    # MPICH's process manager talks to the program through one descriptor. It leaves its others open too, and waits
    # until nobody has them, be it a child that outlives the program. Of other managers we do not know what they need.
    manager = os.environ.get("PMI_FD", "")
    try:
        child = subprocess.Popen(
            sys.argv[1:],
            close_fds=manager.isdigit(),
            pass_fds=(int(manager),) if manager.isdigit() else (),
            preexec_fn=lambda: _leave_group(parent),
            env=os.environ | life.variables,
            stdout=outlet(1),
            stderr=outlet(2),
        )
    except OSError as error:
        code, reason = refusal(sys.argv[1:], error=error) or (1, str(error))
        os.write(2, f"ringrun: {reason}\n".encode())
        report(RankFailure(rank_in(), socket.gethostname(), code, time.time()))
        sys.exit(code)
    output = carry(child)
    if stopping:  # asked to before there was a child to ask
        child.terminate()
    code = child.wait()
    told = life.read()
    fled = not code and told.unfinished
    if (code or fled) and not stopping:
        ended = told.failed_at(code) or time.time()
        report(RankFailure(rank_in(), socket.gethostname(), code, ended, oom_kills() > oom_before, told.aborted))
    output.join()
    if (fled or told.aborted) and not stopping:
        time.sleep(LINGER)
    if (fled or code > 0) and not stopping and manager.isdigit():
        _hang_up(int(manager))
    if code < 0:
        # End by the same signal, without a second core file, so that mpiexec reports what happened.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
