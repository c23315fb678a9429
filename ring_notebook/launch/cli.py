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
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from ring_notebook.analysis.prediction import ScalingOptions, compare
from ring_notebook.analysis.scaling import Measured, measured, table, write_csv
from ring_notebook.analysis.slow_ranks_and_links import SlowLink, SlowRanks, find
from ring_notebook.analysis.time_breakdown import RankTimes, spent
from ring_notebook.config import config
from ring_notebook.errors import RingError
from ring_notebook.launch.batch_commands import login_node_of
from ring_notebook.launch.hosts_of_job import find_allocation
from ring_notebook.launch.job import Job, print_message
from ring_notebook.launch.launchers.hosts import Host, check_slots, only_here
from ring_notebook.launch.own_batch_job import walltime, who_ended_it
from ring_notebook.launch.printed_lines import RankFiles
from ring_notebook.launch.ringrun_options import check_values, elastic_rules, environment, hosts_of, notes, parse
from ring_notebook.launch.shell_run import ShellRun
from ring_notebook.launch.supervisor.growth import NOT_ELASTIC, Elastic
from ring_notebook.launch.supervisor.inherited_variables import ADDED
from ring_notebook.launch.supervisor.start_errors import explain_start
from ring_notebook.machine.gpus import gpus, sharing
from ring_notebook.rank.rank_threads import threads_started
from ring_notebook.rank.started_together import started_several
from ring_notebook.text.words import aligned

_SECONDS_TO_SAY = 2.0  # for the first of several ringruns to print the error; srun may end all when one exits


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: the failed rank's own, 2 for a wrong command line.

    126 or 127, as in shells, for a program that cannot be started.
    """
    _reserve_standard_streams()
    parser, options = parse(sys.argv[1:] if argv is None else argv)
    if options.doctor or options.check_build:
        return _diagnose(parser, options)
    if not options.command:
        parser.error("nothing to run; for example: ringrun -np 4 train.py")
    options.command = _with_python(options.command)
    # In a rank of ours (ADDED) these variables are ours. With -np 1 each ringrun is meant to be alone.
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
        check_values(options)
        if options.jsrun:
            os.environ.setdefault("RING_MPIEXEC", "jsrun")
        named = hosts_of(options)
        allocation = None if named or options.here else find_allocation(cpus_per_rank=options.cpus_per_rank or 0)
        hosts = list(allocation.hosts) if allocation else named
        if allocation and options.verbose:
            print_message(str(allocation))
        if options.ppn:
            hosts = [Host(host.name, options.ppn) for host in hosts]
        if not (hosts or options.here or ADDED in os.environ) and (system := login_node_of()):
            parser.error(
                f"this host is a login node of {system.name}, which others work on; start ringrun in a job "
                f"({system.submit[0]}), or give --here to run it on this host"
            )
        slots = sum(host.slots for host in hosts)
        n = max(options.scale or [0]) or options.np or min(slots, options.max_np or slots) or options.ppn or 0
        if n < 1:
            parser.error("the number of ranks is missing: give -np N, -H or --hostfile, or run in an allocation")
        if options.ppn and not hosts and n > options.ppn:
            parser.error(f"-np {n} with --ppn {options.ppn} needs several hosts; name them with -H")
        here = only_here(hosts)
        if named:
            check_slots(n, hosts)
        elif allocation and (options.ppn or not here):
            replace(allocation, hosts=tuple(hosts)).check_slots(n)
        if here and (shared := sharing(n, gpus())):
            print_message(shared)
        elastic = elastic_rules(options, n)
        for note in notes(options, here):
            print_message(note)
        # `python` means the Python that ringrun belongs to, also when its environment is not activated.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        if here and (problem := explain_start(options.command, path)):  # nothing is known of other hosts
            print_message(problem[1])
            return problem[0]
        if not options.cpus_per_rank and not options.scale and (message := threads_started(n, here)):
            print_message(message)
        env = {"PATH": path, **environment(options)}
        walltime().warn = print_message
        try:
            return _scale(options, hosts, env) if options.scale else _run(options, hosts, n, elastic, env)
        finally:
            walltime().close()
    except OSError as error:
        few = "; this process may open too few files, raise `ulimit -n`" if error.errno == errno.EMFILE else ""
        parser.error(f"{error}{few}")
    except (RingError, ValueError) as error:
        parser.error(str(error))


def _diagnose(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Check the named hosts, else the allocation's, else this one. Returns 1 if a check has failed."""
    from ring_notebook.launch.doctor import as_json, diagnose_hosts, render

    try:
        check_values(options)
        hosts = hosts_of(options)
        if not hosts and (allocation := find_allocation()):
            hosts = list(allocation.hosts)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    os.environ.update(environment(options))
    config.cache_clear()
    checks = diagnose_hosts(hosts)
    print(as_json(checks) if options.json else render(checks))  # noqa: T201 - this is what the command is for
    return int(any(check.status == "fail" for check in checks))


def _scale(options: argparse.Namespace, hosts: Sequence[Host], env: Mapping[str, str]) -> int:
    """Run the program at each size, and print how it scales. The exit code is that of the first job that fails."""
    if options.csv:
        open(options.csv, "a").close()  # before the runs, which may take hours
    runs: list[Measured] = []
    for number in range(1, options.repeat + 1):  # every size in turn, so that all see what the machine does meanwhile
        for n in sorted(set(options.scale)):
            which = f", run {number} of {options.repeat}" if options.repeat > 1 else ""
            print_message(f"{n} rank{'s' * (n != 1)}{which}")
            times: dict[int, RankTimes] = {}
            if code := _run(options, hosts, n, NOT_ELASTIC, env, times, f"np.{n}/run.{number}"):
                return code
            if len(times) < n:
                print_message(
                    f"--scale {n}: {n - len(times)} of {n} ranks logged too few steps after --warmup {options.warmup}; "
                    "each step has to call ring.log(samples=...), or to take its batch from ring.track"
                )
                return 2
            runs.append(measured([times[rank] for rank in sorted(times)]))
    points, notes = compare(
        runs, ScalingOptions(**{one.name: getattr(options, one.name) for one in fields(ScalingOptions)})
    )
    if options.csv:
        write_csv(points, options.csv)
    columns, rows = table(points)
    print(aligned([columns, *rows]), *notes, sep="\n")  # noqa: T201 - this is what the command is for
    return 0


def _run(
    options: argparse.Namespace,
    hosts: Sequence[Host],
    n: int,
    elastic: Elastic,
    env: Mapping[str, str],
    times: dict[int, RankTimes] | None = None,
    folder: str = "",
) -> int:
    """Run one job; returns its exit code. ``times`` gets what ranks measured; ``folder`` is below ``--output-dir``."""
    files = RankFiles(Path(options.output_dir, folder), n) if options.output_dir else None
    run = ShellRun(options.command, n)
    job = Job(
        options.command,
        n,
        hosts,
        env,
        shlex.split(f"{options.mpi_args} {options.binding_args}"),
        elastic=elastic,
        start_timeout=options.start_timeout,
        prefix=not options.no_prefix,
        times=options.times,
        files=files,
    )
    if options.verbose:
        print(shlex.join(job.command), file=sys.stderr, flush=True)  # noqa: T201
    with job.signals_passed_on():
        code = job.wait()
    if times is not None:
        times.update(job.times)
    elif slow := _what_is_slow(job.times):
        print_message(slow.sentence)
    error = ""
    if code:  # if the batch system ended the job, that is why ranks failed
        error = who_ended_it() or ("" if job.verdict.ended_by else job.describe_failure())
    if error:
        print_message(error)
    if job.times and times is None:
        try:
            run.keep("ok" if not code else "interrupted" if job.verdict.ended_by else "failed", error, job.times)
        except OSError as why:
            print_message(f"`%ring runs` will not list this run: {why}")
    if files and files.error:
        print_message(f"not all output is kept: {files.error}")
    return code


def _what_is_slow(times: Mapping[int, RankTimes]) -> SlowRanks | SlowLink | None:
    """The ranks or the link that other ranks wait for, if the script logged its steps."""
    accounts = {rank: spent(one.spent, one.seconds) for rank, one in times.items()}
    return find(accounts, max((one.steps for one in times.values()), default=0))


def _reserve_standard_streams() -> None:
    """Open closed standard streams on /dev/null, so that no pipe or socket gets their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _with_python(command: list[str]) -> list[str]:
    """``command`` with ``python`` before a Python script, unless its first line names an interpreter."""
    script = command[0]
    if not script.endswith(".py") or not os.path.isfile(script):
        return command
    with contextlib.suppress(OSError), open(script, "rb") as file:
        if shutil.which(script) and file.read(2) == b"#!":
            return command
    return ["python", *command]


if __name__ == "__main__":
    sys.exit(main())
