"""``ringrun``: start a program on several ranks, as ``horovodrun`` does."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ring_notebook import __version__
from ring_notebook.errors import RingError
from ring_notebook.gpus import gpus, sharing
from ring_notebook.horovod.as_horovod import variables
from ring_notebook.launch.allocation import find_allocation
from ring_notebook.launch.job import Job, print_message
from ring_notebook.launch.launchers.hosts import Host, check_slots, named_hosts, only_here
from ring_notebook.launch.supervisor.outer_job import ADDED
from ring_notebook.launch.supervisor.start_error import explain_start
from ring_notebook.rank.launch_check import started_several
from ring_notebook.rank.rank_threads import threads_started

__all__ = ["main"]

_SECONDS_TO_SAY = 2.0  # that the first of several ringruns has to say what is wrong; srun may end all when one ends


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: the failed rank's own, 2 for a wrong command line.

    126 and 127 for a program that cannot be started, as shells have it.
    """
    argv = sys.argv[1:] if argv is None else argv
    _reserve_standard_streams()
    parser = _parser()
    options = parser.parse_args(argv)
    if options.doctor or options.check_build:
        from ring_notebook.launch.doctor import diagnose, render

        checks = diagnose()
        print(render(checks))  # noqa: T201 - this is what the command is for
        return int(any(check.status == "fail" for check in checks))
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        parser.error("nothing to run; for example: ringrun -np 4 train.py")
    options.command = _with_python(options.command)
    # Within a rank of ours its variables are ours. With -np 1 each is meant to be alone.
    if options.np != 1 and ADDED not in os.environ and (several := started_several()):
        launcher, number, n = several
        if number:
            time.sleep(_SECONDS_TO_SAY)
            return 2
        parser.error(
            f"{launcher} has started ringrun {n} times, and each would start a job of its own; start it once, without "
            f"{launcher}: it takes the hosts of the allocation and starts the ranks itself"
        )
    try:
        named = named_hosts(options.hosts, options.hostfile)
        allocation = None if named else find_allocation()
        hosts = list(allocation.hosts) if allocation else named
        if allocation and options.verbose:
            print_message(str(allocation))
        n = sum(host.slots for host in hosts) if options.np is None else options.np
        if options.np is not None and n < 1:
            parser.error(f"-np must be at least 1, got {n}")
        if n < 1:
            parser.error("the number of ranks is missing: give -np N, -H or --hostfile, or run in an allocation")
        if named:
            check_slots(n, named)
        if only_here(hosts) and (shared := sharing(n, gpus())):
            print_message(shared)
        min_np = 1 if options.min_np is None else options.min_np
        if not 1 <= min_np <= n:
            parser.error(f"--min-np must be between 1 and the {n} ranks of the job, got {min_np}")
        elastic = options.elastic or options.min_np is not None  # as horovodrun takes it
        if options.start_timeout is not None and not options.start_timeout >= 0:
            parser.error(f"--start-timeout must be at least 0 seconds, got {options.start_timeout:g}")
        if options.reset_limit < 0:
            parser.error(f"--reset-limit must be at least 0, got {options.reset_limit}")
        starts = _Starts(options, hosts, n, min_np if elastic else 0)
        if problem := starts.start_error():
            print_message(problem[1])
            return problem[0]
        if said := threads_started(n, only_here(hosts)):
            print_message(said)
        return starts.run()
    except OSError as error:
        few = "; this process may open too few files, raise `ulimit -n`" if error.errno == errno.EMFILE else ""
        parser.error(f"{error}{few}")
    except (RingError, ValueError) as error:
        parser.error(str(error))


class _Starts:
    """Starts the job, and restarts an elastic job of several hosts, which cannot continue without a dead rank."""

    def __init__(self, options: argparse.Namespace, hosts: list[Host], n: int, min_np: int) -> None:
        self._options = options
        self._hosts = hosts
        self._n = n
        self._min_np = min_np if only_here(hosts) else 0
        self._restarts = options.reset_limit if min_np and not only_here(hosts) else 0
        self._environment = _environment(options)
        if self._restarts and not os.environ.get("RING_COMMIT_DIR"):
            self._environment["RING_COMMIT_DIR"] = str(Path(".ring/commits").absolute())

    def start_error(self) -> tuple[int, str] | None:
        """Exit code and reason when the program cannot be started on this host; nothing is known of other hosts."""
        if not only_here(self._hosts):
            return None
        return explain_start(self._options.command, self._environment["PATH"])

    def run(self) -> int:
        """The exit code of the last job."""
        for attempt in range(self._restarts + 1):
            job = Job(
                self._options.command,
                self._n,
                self._hosts,
                self._environment,
                shlex.split(self._options.mpi_args),
                min_np=self._min_np,
                start_timeout=self._options.start_timeout,
            )
            if self._options.verbose:
                print(shlex.join(job.command), file=sys.stderr, flush=True)  # noqa: T201
            with job.signals_passed_on():
                code = job.wait()
            if not code or job.verdict.ended_by:
                break
            if attempt < self._restarts:
                print_message(f"{job.describe_failure()}; restarting the job ({attempt + 1} of {self._restarts})")
            else:
                print_message(job.describe_failure())
        return code


def _reserve_standard_streams() -> None:
    """Keep the numbers of streams that are closed: a pipe or a socket that gets one would be taken for the stream."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _with_python(command: list[str]) -> list[str]:
    """A Python script behind ``python``, unless it says itself, in its first line, what runs it."""
    script = command[0]
    if not script.endswith(".py") or not os.path.isfile(script):
        return command
    with contextlib.suppress(OSError), open(script, "rb") as file:
        if shutil.which(script) and file.read(2) == b"#!":
            return command
    return ["python", *command]


def _environment(options: argparse.Namespace) -> dict[str, str]:
    # `python` means the Python that ringrun belongs to, also when its environment is not activated.
    env = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])}
    if options.timeline_filename:
        env["RING_TIMELINE"] = options.timeline_filename
    if options.horovod:
        env |= variables()
    if options.fusion_threshold_mb is not None:
        env["RING_FUSION_THRESHOLD"] = str(options.fusion_threshold_mb << 20)
    return env


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringrun", description=__doc__, usage="ringrun -np N [options] command ...", allow_abbrev=False
    )
    parser.add_argument("-np", "--num-proc", dest="np", type=int, metavar="N", help="number of ranks")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="the hosts, and how many ranks each may run")
    where.add_argument("-hostfile", "--hostfile", metavar="FILE", help="the same, one host a line: 'a slots=2'")
    parser.add_argument("--horovod", action="store_true", help="make `import horovod` mean Ring Notebook in the ranks")
    parser.add_argument("--elastic", action="store_true", help="continue without ranks that die (see elastic.run)")
    parser.add_argument("--min-np", type=int, metavar="K", help="the same, while so many ranks are left")
    parser.add_argument(
        "--reset-limit",
        type=int,
        default=3,
        metavar="N",
        help="how often --elastic restarts a job of several hosts",
    )
    parser.add_argument(
        "--start-timeout", type=float, metavar="S", help="seconds that mpiexec or srun has to start all ranks"
    )
    parser.add_argument("--timeline-filename", metavar="FILE", help="write a Chrome trace of the collectives")
    parser.add_argument("--fusion-threshold-mb", type=int, metavar="MIB", help="size of a gradient bucket")
    parser.add_argument(
        "--mpi-args", default="", metavar="ARGS", help="more options for mpiexec, quoted as for a shell"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="print the allocation and the command line of the launcher"
    )
    parser.add_argument("--version", action="version", version=f"ringrun {__version__}")
    parser.add_argument("--doctor", action="store_true", help="check this machine and say what to repair")
    parser.add_argument("-cb", "--check-build", action="store_true", help="the same (Horovod's name)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="program and arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
