"""Starts the ranks of a job on its hosts, which they fill in order, and supervises them.

``python -m ring_notebook.launch.supervise N ELASTIC REQUESTS HOSTS PROGRAM ARGS...``. HOSTS is ``HOST:SLOTS,...``,
empty for this host. Nothing starts anywhere before the agents of all other hosts have answered.

With an ELASTIC of 0 all ranks end soon after one fails. Otherwise the job is elastic (`Elastic`): it continues while so
many ranks are left, may grow, and has no MPI. With REQUESTS the ranks are engines of a notebook (`EngineSupervisor`).
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
from collections.abc import Iterable, Sequence
from types import FrameType

from ring_notebook.analysis.job_failure import Rules
from ring_notebook.launch.connections.connections import Connections, new_job_name
from ring_notebook.launch.connections.mpi_host import ALONE
from ring_notebook.launch.launchers.hosts import Host, discovered_hosts, is_local, parse_hosts, place, slots_by_name
from ring_notebook.launch.remote.network import network_variables
from ring_notebook.launch.remote.remote_ranks import HostsLostError, RemoteRanks, connect
from ring_notebook.launch.supervisor.engine_supervisor import EngineSupervisor
from ring_notebook.launch.supervisor.growth import Elastic, Growth
from ring_notebook.launch.supervisor.inherited_variables import GIVEN, without_outer_job
from ring_notebook.launch.supervisor.local_ranks import Assignment, HostRanks, LocalRanks, raise_file_limit
from ring_notebook.launch.supervisor.start_errors import report_start_error
from ring_notebook.launch.supervisor.stderr_reports import report
from ring_notebook.launch.supervisor.supervisor import Hosts, Supervisor
from ring_notebook.launch.supervisor.tagged_output import TAGGED
from ring_notebook.rank.rank_variables import MASTER, loopback


def main() -> None:
    """Run the program of ``sys.argv`` and exit with the exit code of the job."""
    n, elastic, requests, hosts = int(sys.argv[1]), Elastic.parse(sys.argv[2]), sys.argv[3], parse_hosts(sys.argv[4])
    program = sys.argv[5:]
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _leave)  # until the supervisor takes them; ssh and the agents end with us
    try:
        supervisor = _supervise(program, n, elastic, requests, hosts)
    except HostsLostError as error:
        for host in error.hosts:
            if host.unusable is not None:
                report(host.unusable)
        sys.exit(1)
    except OSError as error:
        sys.exit(report_start_error(program, error))
    sys.exit(supervisor.run())


def _supervise(program: list[str], n: int, elastic: Elastic, requests: str, known: Sequence[Host]) -> Supervisor:
    """The supervisor of ranks that have been started, after the agents of all other hosts have answered."""
    files = raise_file_limit()
    job, environment = new_job_name(), without_outer_job(os.environ)
    placed, slots = place(n, known), slots_by_name(known) or {socket.gethostname(): n}
    elsewhere = [name for name in (slots if elastic.grows else placed) if not is_local(name)]
    master = (os.environ.get(MASTER) if elsewhere else "") or loopback()
    network = network_variables(elsewhere) if elsewhere else ALONE
    number = {rank: index for index, ranks in enumerate(placed.values()) for rank in ranks}
    connections = Connections(job, [number[rank] for rank in range(n)], network, bool(elastic.min_np))
    tagged, given = TAGGED in os.environ, tuple(os.environ.get(GIVEN, "").split())

    def make(name: str, ranks: list[int], size: int, others: Iterable[str]) -> HostRanks:
        engines = bool(requests)
        assignment = Assignment(program, environment, ranks, size, master, elastic.min_np, tagged, engines, given)
        if is_local(name):
            return LocalRanks(assignment, connections.variables, files)
        return RemoteRanks(name, assignment, [other for other in others if other != name], job)

    hosts = Hosts(make, {name: make(name, ranks, n, placed) for name, ranks in placed.items()}, slots)
    connect([host for host in hosts.by_name.values() if isinstance(host, RemoteRanks)])
    if requests:
        return EngineSupervisor(hosts, connections, n, program, requests)
    growth = Growth(elastic, slots) if elastic.grows else None
    ask = functools.partial(_ask, elastic) if elastic.script else None
    return Supervisor(
        hosts, connections, Rules(n, elastic.min_np, patience=elastic.patience if growth else 0.0), program, growth, ask
    )


def _ask(elastic: Elastic) -> dict[str, int]:
    """The slots of the hosts that the script of the job names now."""
    return slots_by_name(discovered_hosts(elastic.script, elastic.slots))


def _leave(signum: int, _frame: FrameType | None) -> None:
    sys.exit(128 + signum)


if __name__ == "__main__":
    main()
