"""Starts the ranks of a job on its hosts, which they fill in order, and supervises them.

``python -m ring_notebook.launch.supervise N MIN_NP REQUESTS HOSTS PROGRAM ARGS...``. HOSTS is ``HOST:SLOTS,...``, empty
for this host. Nothing starts anywhere before the agents of all other hosts have answered.

With a MIN_NP of 0 all ranks end soon after one fails. Otherwise the job is elastic: it continues while MIN_NP ranks are
left, which have no MPI. With REQUESTS the ranks are engines of a notebook (`EngineSupervisor`).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType

from ring_notebook.launch.connections.connections import Connections, new_job_name
from ring_notebook.launch.connections.mpi_host import ALONE
from ring_notebook.launch.launchers.hosts import Host, is_local, parse_hosts
from ring_notebook.launch.remote.network import network_variables
from ring_notebook.launch.remote.remote_ranks import HostsLostError, RemoteRanks, connect
from ring_notebook.launch.remote.remote_shell import agent_command
from ring_notebook.launch.supervisor.engine_supervisor import EngineSupervisor
from ring_notebook.launch.supervisor.local_ranks import Assignment, HostRanks, LocalRanks, raise_file_limit
from ring_notebook.launch.supervisor.outer_job import without_outer_job
from ring_notebook.launch.supervisor.output_lines import TAGGED
from ring_notebook.launch.supervisor.rank_failure import report, report_start_error
from ring_notebook.launch.supervisor.supervisor import Supervisor
from ring_notebook.rank.rank_variables import MASTER, loopback
from ring_notebook.verdict import Rules


def place(n: int, hosts: Sequence[Host]) -> dict[str, list[int]]:
    """The ranks of each host, in order, for ``n`` ranks; hosts that get none are left out. No hosts mean this one.

    ``place(3, [Host("a", 2), Host("b", 2), Host("c", 1)])`` gives ``{"a": [0, 1], "b": [2]}``. A host may be named
    twice, and all names of this one are one.
    """
    placed: dict[str, list[int]] = {}
    rank = 0
    for host in hosts or [Host(socket.gethostname(), n)]:
        here = range(rank, min(rank + host.slots, n))
        if here:
            placed.setdefault(socket.gethostname() if is_local(host.name) else host.name, []).extend(here)
        rank += len(here)
    return placed


def main() -> None:
    """Run the program of ``sys.argv`` and exit with the exit code of the job."""
    n, min_np, requests = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    placed, program = place(n, parse_hosts(sys.argv[4])), sys.argv[5:]
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _leave)  # until the supervisor takes them; ssh and the agents end with us
    try:
        supervisor = _supervise(program, n, min_np, requests, placed)
    except HostsLostError as error:
        for host in error.hosts:
            if host.unusable is not None:
                report(host.unusable)
        sys.exit(1)
    except OSError as error:
        sys.exit(report_start_error(program, error))
    sys.exit(supervisor.run())


def _supervise(program: list[str], n: int, min_np: int, requests: str, placed: dict[str, list[int]]) -> Supervisor:
    """The supervisor of ranks that have been started, after the agents of all other hosts have answered."""
    files = raise_file_limit()
    job, environment = new_job_name(), without_outer_job(os.environ)
    elsewhere = [name for name in placed if not is_local(name)]
    master = (os.environ.get(MASTER) if elsewhere else "") or loopback()
    network = network_variables(elsewhere) if elsewhere else ALONE
    number = {rank: index for index, ranks in enumerate(placed.values()) for rank in ranks}
    connections = Connections(job, [number[rank] for rank in range(n)], network, bool(min_np))
    hosts: list[HostRanks] = []
    for name, ranks in placed.items():
        tagged = TAGGED in os.environ
        assignment = Assignment(program, environment, ranks, n, master, min_np, tagged, engines=bool(requests))
        if is_local(name):
            hosts.append(LocalRanks(assignment, connections.variables, files))
        else:
            others = [other for other in placed if other != name]
            hosts.append(RemoteRanks(name, assignment, others, job, agent_command(name)))
    connect([host for host in hosts if isinstance(host, RemoteRanks)])
    if requests:
        return EngineSupervisor(hosts, connections, n, program, requests)
    return Supervisor(hosts, connections, Rules(n, min_np))


def _leave(signum: int, _frame: FrameType | None) -> None:
    sys.exit(128 + signum)


if __name__ == "__main__":
    main()
