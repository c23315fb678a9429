"""``ringrun``: start a program on several ranks, as ``horovodrun`` does."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ring_notebook import __version__
from ring_notebook.errors import RingError
from ring_notebook.launch.hosts import Host, allocation, check_slots, named
from ring_notebook.launch.job import Job, say
from ring_notebook.launch.mpi import only_here
from ring_notebook.launch.refusal import refusal

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: the failed rank's own, 2 for a wrong command line.

    126 and 127 for a program that cannot be started, as shells have it.
    """
    argv = sys.argv[1:] if argv is None else argv
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
        parser.error("nothing to run; for example: ringrun -np 4 python train.py")
    try:
        wanted = named(options.hosts, options.hostfile)
        hosts = wanted or allocation()
        n = sum(host.slots for host in hosts) if options.np is None else options.np
        if options.np is not None and n < 1:
            parser.error(f"-np {n}: at least 1")
        if n < 1:
            parser.error("say how many ranks: -np N (only an allocation, -H or --hostfile can say it for you)")
        if wanted:
            check_slots(n, wanted)
        least = 1 if options.min_np is None else options.min_np
        if not 1 <= least <= n:
            parser.error(f"--min-np {least}: must be between 1 and the {n} ranks that there are")
        elastic = options.elastic or options.min_np is not None  # as horovodrun takes it
        starts = _Starts(options, hosts, n, least if elastic else 0)
        if refused := starts.refused(argv):
            say(refused[1])
            return refused[0]
        return starts.run()
    except (RingError, ValueError, OSError) as error:
        parser.error(str(error))


class _Starts:
    """Starts the job, and on several hosts, where ranks cannot go on without one that died, starts it again."""

    def __init__(self, options: argparse.Namespace, hosts: list[Host], n: int, least: int) -> None:
        self._options = options
        self._hosts = hosts
        self._n = n
        self._least = least if only_here(hosts) else 0
        self._again = options.reset_limit if least and not only_here(hosts) else 0
        self._environment = _environment(options)
        if self._again and not os.environ.get("RING_COMMIT_DIR"):
            self._environment["RING_COMMIT_DIR"] = str(Path(".ring/commits").absolute())

    def refused(self, argv: Sequence[str]) -> tuple[int, str] | None:
        """Exit code and reason when the program cannot be started on this host, which alone is known from here."""
        if not only_here(self._hosts):
            return None
        command = self._options.command
        before = shlex.join(["ringrun", *argv[: len(argv) - len(command)]])
        return refusal(command, self._environment["PATH"], f"{before} ")

    def run(self) -> int:
        """The exit code of the last job."""
        for attempt in range(self._again + 1):
            job = Job(
                self._options.command,
                self._n,
                self._hosts,
                self._environment,
                self._options.mpi_args.split(),
                min_np=self._least,
            )
            if self._options.verbose:
                print(" ".join(job.command), file=sys.stderr, flush=True)  # noqa: T201
            with job.signals_handed_on():
                code = job.wait()
            if not code or job.ended_by:
                break
            if attempt < self._again:
                say(f"{job.describe_failure()}; starting again ({attempt + 1} of {self._again})")
            else:
                say(job.describe_failure())
        return code


def _environment(options: argparse.Namespace) -> dict[str, str]:
    # `python` means the Python that ringrun belongs to, also when its environment is not activated.
    env = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])}
    if options.timeline_filename:
        env["RING_TIMELINE"] = options.timeline_filename
    if options.fusion_threshold_mb is not None:
        env["RING_FUSION_THRESHOLD"] = str(options.fusion_threshold_mb << 20)
    return env


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringrun", description=__doc__, usage="ringrun -np N [options] command ...", allow_abbrev=False
    )
    parser.add_argument("-np", "--num-proc", dest="np", type=int, metavar="N", help="how many ranks")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts, and how many ranks each may run")
    where.add_argument("-hostfile", "--hostfile", metavar="FILE", help="the same, one host a line: 'a slots=2'")
    parser.add_argument("--elastic", action="store_true", help="go on when ranks die (see elastic.run)")
    parser.add_argument("--min-np", type=int, metavar="K", help="the same, as long as so many ranks are left")
    parser.add_argument(
        "--reset-limit",
        type=int,
        default=3,
        metavar="N",
        help="how often --elastic starts a job of several hosts again",
    )
    parser.add_argument("--timeline-filename", metavar="FILE", help="write a Chrome trace of the collectives")
    parser.add_argument("--fusion-threshold-mb", type=int, metavar="MIB", help="size of a gradient bucket")
    parser.add_argument("--mpi-args", default="", metavar="ARGS", help="more options for mpiexec, in one string")
    parser.add_argument("--verbose", action="store_true", help="print the mpiexec command line")
    parser.add_argument("--version", action="version", version=f"ringrun {__version__}")
    parser.add_argument("--doctor", action="store_true", help="check this machine and say what to mend")
    parser.add_argument("-cb", "--check-build", action="store_true", help="the same (Horovod's name)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="program and arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
