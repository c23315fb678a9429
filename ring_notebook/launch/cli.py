"""``ringrun``: start a program on several ranks, as ``horovodrun`` does."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ring_notebook.errors import RingError
from ring_notebook.launch.hosts import Host, allocation, parse_hostfile, parse_hosts
from ring_notebook.launch.job import Job

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: the failed rank's own, 2 for a wrong command line."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.doctor or options.check_build:
        from ring_notebook.launch.doctor import diagnose, render

        checks = diagnose()
        print(render(checks))  # noqa: T201 - this is what the command is for
        return int(any(check.status == "fail" for check in checks))
    if not options.command:
        parser.error("nothing to run; for example: ringrun -np 4 python train.py")
    try:
        hosts = _hosts(options)
        n = options.np or sum(host.slots for host in hosts)
        if n < 1:
            parser.error("say how many ranks: -np N (only an allocation, -H or --hostfile can say it for you)")
        job = Job(options.command, n, hosts, _environment(options), options.mpi_args.split())
    except (RingError, ValueError, OSError) as error:
        parser.error(str(error))
    if options.verbose:
        print(" ".join(job.command), file=sys.stderr)  # noqa: T201
    with job.signals_handed_on():
        code = job.wait()
    if code and not job.ended_by:
        print(f"ringrun: {job.describe_failure()}", file=sys.stderr)  # noqa: T201
    return code


def _hosts(options: argparse.Namespace) -> list[Host]:
    if options.hosts:
        return parse_hosts(options.hosts)
    if options.hostfile:
        return parse_hostfile(Path(options.hostfile).read_text())
    return allocation()


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
    parser.add_argument("-np", "--num-proc", dest="np", type=int, default=0, metavar="N", help="how many ranks")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts, and how many ranks each may run")
    where.add_argument("-hostfile", "--hostfile", metavar="FILE", help="the same, one host a line: 'a slots=2'")
    parser.add_argument("--timeline-filename", metavar="FILE", help="write a Chrome trace of the collectives")
    parser.add_argument("--fusion-threshold-mb", type=int, metavar="MIB", help="size of a gradient bucket")
    parser.add_argument("--mpi-args", default="", metavar="ARGS", help="more options for mpiexec, in one string")
    parser.add_argument("--verbose", action="store_true", help="print the mpiexec command line")
    parser.add_argument("--doctor", action="store_true", help="check this machine and say what to mend")
    parser.add_argument("-cb", "--check-build", action="store_true", help="the same (Horovod's name)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="program and arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
