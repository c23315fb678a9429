"""The process that mpiexec or srun starts for each rank: it runs the program and reports how that ended.

``python -m ring_notebook.launch.supervisor.rank_wrapper PROGRAM ARGS...``; the report lets the job name the rank that
failed first.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time

from ring_notebook.analysis.job_failure import ENDS_NOTHING, judge_parting
from ring_notebook.analysis.time_limits import LINGER
from ring_notebook.launch.supervisor.inherited_variables import with_variables_of_job
from ring_notebook.launch.supervisor.start_and_signal import (
    FORWARDED,
    end_children,
    end_if_late,
    send_signal,
    start_rank,
)
from ring_notebook.launch.supervisor.start_errors import report_start_error
from ring_notebook.launch.supervisor.stderr_reports import MemoryKills, RankMark, failure_of, report
from ring_notebook.launch.supervisor.tagged_output import TAGGED, carry
from ring_notebook.machine.gpus import gpus, gpus_of_script
from ring_notebook.machine.os_calls import exit_descriptor, set_resource_limits
from ring_notebook.rank.rank_status import StatusFile, rank_of_process
from ring_notebook.rank.rank_threads import launched_thread_variables
from ring_notebook.rank.rank_variables import variables_of_rank

_SECONDS_TO_LOOK = 1.0


def _hang_up(manager: int) -> None:
    """Close the connection to Hydra unless MPI has closed it, and let Hydra end the other ranks and this one.

    Hydra ends them when the connection closes and it does not know yet that this process has exited. An exit does both
    at once; when Hydra sees the exit first (MPICH 5.0), it leaves the other ranks to wait for ever.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=manager) as line:
        try:
            closed = line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            closed = False
        # Closing is not enough: children of the program may have inherited the connection.
        line.shutdown(socket.SHUT_RDWR)
        if not closed:
            time.sleep(LINGER)


def _wait(child: subprocess.Popen[bytes], status_file: StatusFile, kills: MemoryKills) -> int:
    """Wait for the program, and end one that has failed and waits for other ranks. Returns how it ended."""
    late = False
    exited = exit_descriptor(child.pid)
    while not select.select([exited], [], [], _SECONDS_TO_LOOK)[0]:
        kills.look()
        late = end_if_late(child, status_file.read())
    os.close(exited)
    code = child.wait()
    return status_file.read().code if late else code


def main() -> None:
    """Run the program of ``sys.argv``, pass signals on to it, and end as it ends."""
    stopping = False
    kills = MemoryKills()

    def pass_on(signum: int, _frame: object) -> None:
        nonlocal stopping
        stopping = stopping or signum not in ENDS_NOTHING
        if child is not None:
            send_signal(child, signum)

    child: subprocess.Popen[bytes] | None = None
    for signum in FORWARDED:
        signal.signal(signum, pass_on)
    status_file = StatusFile()
    # Hydra and Slurm talk to the program through one descriptor. They leave others open too and wait until no process
    # has them, such as a child that outlives the program. What other process managers need we do not know.
    manager = os.environ.get("PMI_FD", "")
    added = variables_of_rank() | launched_thread_variables()
    if "LOCAL_RANK" in added:
        added |= gpus_of_script(int(added["LOCAL_RANK"]), gpus())
    try:
        # mpiexec signals whole process groups; in a group of its own the program gets each signal once, from us.
        child = start_rank(
            sys.argv[1:],
            with_variables_of_job(os.environ, added) | status_file.variables,
            None,
            [int(manager)] if manager.isdigit() else [],
            close_fds=manager.isdigit(),
        )
    except OSError as error:
        code = report_start_error(sys.argv[1:], error)
        report(failure_of(rank_of_process(), code, status_file.read(), kills))
        sys.exit(code)
    report(RankMark(rank_of_process(), ended=False))
    output = carry(child, rank_of_process() if TAGGED in os.environ else None)
    if stopping:  # a signal came before there was a child
        child.terminate()
    code = _wait(child, status_file, kills)
    if stopping:
        end_children(child.pid)
    status = status_file.read()
    reports, linger, hangs_up = judge_parting(code, status.left_early, status.aborted, stopping)
    if reports:
        report(failure_of(rank_of_process(), code, status, kills))
    output.join()
    report(RankMark(rank_of_process(), ended=True))
    time.sleep(linger)
    if hangs_up and manager.isdigit():
        _hang_up(int(manager))
    if code < 0:
        # End by the same signal, without a second core file, so that mpiexec reports what happened.
        set_resource_limits(resource.RLIMIT_CORE, 0, 0)
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
