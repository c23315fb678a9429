"""The doctor of all hosts of a job: visits each, compares them, and has ranks of all of them sum.

It starts this module as a program on each host, like an agent. The program greets, tells its time when asked, reads one
JSON text and answers with one: its checks, and what is compared between hosts.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from ring_notebook import __version__
from ring_notebook.analysis.job_failure import describe_exit
from ring_notebook.analysis.time_limits import SECONDS_TO_CONNECT
from ring_notebook.config import config
from ring_notebook.files.private_files import temporary_folder
from ring_notebook.launch.doctor_checks import (
    Check,
    against_limit,
    check_allreduce,
    diagnose,
    installed,
    measure_allreduce,
    starts_no_rank,
)
from ring_notebook.launch.launchers.hosts import Host, is_local, slots_by_name
from ring_notebook.launch.launchers.own_launchers import processes_allowed
from ring_notebook.launch.remote.frames import Dialogue, take_streams
from ring_notebook.launch.remote.network import interface_towards
from ring_notebook.launch.remote.peer_certificate import Way, forget
from ring_notebook.launch.remote.remote_shell import agent_command, shell_environment, way_to
from ring_notebook.launch.supervisor.inherited_variables import take_environment, without_outer_job
from ring_notebook.launch.supervisor.parent_death import wrap
from ring_notebook.machine.hardware import RDMA
from ring_notebook.machine.os_calls import clone3_is_refused, number_in
from ring_notebook.machine.own_python import module_command

_SECONDS_TO_ANSWER = 240.0  # for all checks of a host: MPI, torch and GPUs are used, and a disk may be slow
_CLOCKS_APART = 1.0  # seconds; beyond, reports of two hosts may come in the wrong order
_MOST_VISITS = 64  # at a time
_INTERFACES = Path("/sys/class/net")
_PROGRAM = "ring_notebook.launch.doctor"
_FIRST = ("versions", "core", "network")
"""When one of these fails, ranks of several hosts cannot sum, so this is not tried."""
_NO_WAY = "connect|timed out|time out|unreachable|no route|refused|no result within|no answer"
_SAME = "install the same environment at the same path on every host"


@dataclass(frozen=True)
class Visit:
    """The result of one host: its checks, and what is compared with other hosts.

    ``offset``: how many seconds its clock is before ours, give or take ``doubt``. ``speed``: bytes per second that its
    network interface claims; None where it is unknown.
    """

    host: str
    checks: list[Check] = field(default_factory=list)
    versions: Mapping[str, str] = field(default_factory=dict)
    interface: str = ""
    speed: float | None = None
    offset: float = 0.0
    doubt: float = 0.0


def diagnose_hosts(hosts: Sequence[Host] = ()) -> list[Check]:
    """Check all hosts at the same time, then what is between them; no hosts mean this one."""
    try:
        thread = threading.Thread(target=bool)
        thread.start()
        thread.join()
    except RuntimeError as error:
        return [_no_thread(str(error))]
    slots = slots_by_name(hosts or [Host(socket.gethostname(), 0)])
    text, token = uuid.uuid4().hex, Path(f".ring-doctor-{uuid.uuid4().hex}").absolute()
    started: list[subprocess.Popen[bytes]] = []
    try:
        with suppress(OSError):  # nobody may write here
            token.write_text(text)
        shown = token if token.exists() else None
        with ThreadPoolExecutor(min(len(slots), _MOST_VISITS)) as pool:
            try:
                visits = list(pool.map(lambda name: _visit(name, slots, shown, text, started), slots))
            except BaseException:  # an interrupt: the pool waits for its threads
                pool.shutdown(wait=False, cancel_futures=True)
                for process in started:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                raise
    finally:
        with suppress(OSError):  # on a read-only disk also where there is no file
            token.unlink()
        forget()
    checks = [check for visit in visits for check in visit.checks]
    there = [visit for visit in visits if visit.versions]
    differ = compare(there) if len(slots) > 1 and there else []
    if len(there) > 1 and not any(check.status == "fail" for check in [*differ, *checks] if check.name in _FIRST):
        differ.append(_between(there, {visit.host: max(1, slots[visit.host]) for visit in there}))
    return _once(checks, differ)


def _no_thread(error: str) -> Check:
    if clone3_is_refused():
        found = f"{error}: the sandbox refuses clone3 with EPERM, and the C library needs ENOSYS to call clone instead"
        return Check("system", "fail", found, "update the container's runtime (Docker 20.10.10) or its seccomp profile")
    found = f"{error}: {processes_allowed()} processes and threads are allowed here"
    return Check("system", "fail", found, "allow more: `docker run --pids-limit`, `ulimit -u`")


def _once(checks: Sequence[Check], differ: Sequence[Check]) -> list[Check]:
    """All findings, without the versions of hosts where another line says how they differ."""
    said = {
        name for name in ("python", "torch") for check in differ if check.found.lower().startswith(f"{name} differs")
    }
    return [*(check for check in checks if check.status != "ok" or check.name not in said), *differ]


def render(checks: Sequence[Check]) -> str:
    """A line for each finding, with the hosts that have it unless all do, and under it what to do."""
    every = {check.host for check in checks if check.host}
    found: dict[Check, list[str]] = {}
    for check in checks:
        found.setdefault(replace(check, host=""), []).append(check.host)
    order = list(dict.fromkeys(check.name for check in checks))
    width = max(map(len, order))
    lines = []
    for check, where in sorted(found.items(), key=lambda item: order.index(item[0].name)):
        who = "" if set(where) in ({""}, every) else f"{', '.join(where)}: "
        lines.append(f"{check.status:4}  {check.name:{width}}  {who}{check.found}")
        if check.advice:
            lines.append(f"{'':4}  {'':{width}}  -> {check.advice}")
    return "\n".join(lines)


def as_json(checks: Sequence[Check]) -> str:
    """The checks for tools: a list of objects with name, status, found, advice and host (empty: of all hosts)."""
    return json.dumps([asdict(check) for check in checks], indent=1)


def _visit(
    name: str, slots: Mapping[str, int], token: Path | None, text: str, started: list[subprocess.Popen[bytes]]
) -> Visit:
    """Run all checks on host ``name``; its process is added to ``started``."""
    way: Way = "plain" if is_local(name) else way_to()
    command = module_command(_PROGRAM, way) if is_local(name) else agent_command(name, module=_PROGRAM)
    given = {
        "environment": without_outer_job(os.environ),
        "folder": os.getcwd(),
        "token": str(token or ""),
        "text": text,
        "slots": slots[name],
        "others": [other for other in slots if other != name],
    }
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            process = subprocess.Popen(
                wrap(command),
                env=None if is_local(name) else shell_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            return _unusable(name, f"{command[0]} does not start: {error.strerror}", command)
        started.append(process)
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            dialogue = Dialogue(process.stdout.fileno(), process.stdin.fileno(), way, agent=False)
            try:
                dialogue.hear(SECONDS_TO_CONNECT)
                began = time.time()
                dialogue.say("now")
                clock = float(dialogue.hear(SECONDS_TO_CONNECT))
                ended = time.time()
                dialogue.say(json.dumps(given))
                answer: dict[str, Any] = json.loads(dialogue.hear(_SECONDS_TO_ANSWER))
                dialogue.close()
            except (EOFError, ValueError, OSError) as error:
                process.kill()
                how = str(error) if isinstance(error, EOFError) and str(error) else describe_exit(process.wait())
                errors.seek(0)
                last = errors.read().strip().splitlines()[-1:]
                return _unusable(name, ": ".join([how, *last]), command)
    facts = answer["facts"]
    return Visit(
        name,
        [Check(**{**check, "host": name}) for check in answer["checks"]],
        facts["versions"],
        facts["interface"],
        facts["speed"],
        clock - (began + ended) / 2,
        (ended - began) / 2,
    )


def _unusable(name: str, why: str, command: Sequence[str]) -> Visit:
    advice = f"try it: {shlex.join(command[: command.index(name) + 1] if name in command else command[:1])} true"
    if "No module named" in why or "No such file" in why or "not found" in why:
        advice = _SAME
    return Visit(name, [Check("host", "fail", f"cannot be used: {why}", advice, name)])


def compare(visits: Sequence[Visit]) -> list[Check]:
    checks = []
    for what, status in (("ring_notebook", "fail"), ("Python", "fail"), ("torch", "warn")):
        hosts: dict[str, list[str]] = {}
        for visit in visits:
            version = visit.versions.get(what) or "none"
            # Ranks exchange what Python has pickled: the minor version counts.
            hosts.setdefault(".".join(version.split(".")[:2]) if what == "Python" else version, []).append(visit.host)
        if len(hosts) > 1:
            found = "; ".join(f"{version} on {', '.join(names)}" for version, names in hosts.items())
            checks.append(Check("versions", status, f"{what} differs: {found}", _SAME))  # type: ignore[arg-type]
    apart = {one.host: one.offset for one in visits if abs(one.offset) - one.doubt > _CLOCKS_APART}
    if apart:
        each = (f"that of {host} is {abs(by):.1f} s {'fast' if by > 0 else 'slow'}" for host, by in apart.items())
        advice = "let chrony or another NTP service set them; until then the order of what hosts report may be wrong"
        checks.append(Check("clocks", "warn", f"seen from this host {', '.join(each)}", advice))
    else:
        most = max(abs(one.offset) + one.doubt for one in visits)
        checks.append(Check("clocks", "ok", f"no more than {most:.2g} s apart"))
    return checks


def _between(visits: Sequence[Visit], slots: Mapping[str, int]) -> Check:
    """Measure sums over all hosts, against the speed that their network interfaces claim."""
    ranks, hosts = sum(slots.values()), len(visits)
    where = ",".join(f"{host}:{count}" for host, count in slots.items())
    measured = measure_allreduce(["-np", str(ranks), "-H", where])
    if isinstance(measured, str):
        advice = "repair what this says first; `ringrun` with these hosts shows more"
        if re.search(_NO_WAY, measured, re.IGNORECASE):
            advice = (
                "let the hosts connect to one another on all TCP ports (a firewall?), or name an interface that leads "
                "to all of them: --network-interface NAME, RING_INTERFACE"
            )
        return Check("between hosts", "fail", f"ranks of {hosts} hosts cannot sum: {measured}", advice)
    who = f"{ranks} ranks of {hosts} hosts"
    speeds = [visit.speed for visit in visits if visit.speed]
    if len(speeds) < hosts:
        rate = f"{measured['rate'] / 1e9:.2g} GB/s"
        return Check("between hosts", "ok", f"{who} sum at {rate}; not all interfaces say what they should give")
    # Each host sends the sum of its ranks to the next one in pieces, twice all but one of them.
    limit = min(speeds) / (2 * (hosts - 1) / hosts)
    slowest = min((visit for visit in visits if visit.speed), key=lambda visit: visit.speed or 0.0)
    advice = "measure the link itself, as with iperf3: others may use it; --network-interface NAME takes another one"
    return against_limit(
        "between hosts", who, measured["rate"], limit, f"{slowest.interface} of {slowest.host} claims", advice
    )


def main() -> None:
    """Check this host for the doctor at the other end of standard input and output."""
    dialogue = Dialogue(*take_streams(), cast(Way, sys.argv[1]), agent=True)
    dialogue.say("ready")
    dialogue.hear()
    dialogue.say(repr(time.time()))
    given = json.loads(dialogue.hear())
    forget()
    take_environment(given["environment"])
    config.cache_clear()
    checks = [_disk(given["folder"], given["token"], given["text"])]
    interface, speed = "", None
    if given["others"]:
        interface, speed, found = _network(given["others"])
        checks.append(found)
    checks = [*diagnose(given["slots"]), *checks]
    if not starts_no_rank(checks):
        checks.append(check_allreduce(given["slots"]))
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "versions": {"ring_notebook": __version__, "Python": sys.version.split()[0], "torch": installed("torch")},
        "interface": interface,
        "speed": speed,
    }
    dialogue.say(json.dumps({"checks": [asdict(check) for check in checks], "facts": facts}))
    dialogue.close()


def _disk(folder: str, token: str, text: str) -> Check:
    """Whether this host sees the folder of the job, and a file there that the first host has written."""
    try:
        os.chdir(folder)
    except OSError as error:
        advice = "ranks start in this folder: make it on each host, or start from a folder that all hosts share"
        return Check("disk", "fail", f"{folder}: {error.strerror}", advice)
    if problem := _no_pipes():
        advice = "without them a cluster ends when one engine dies; set TMPDIR to a folder of a local disk"
        return Check("disk", "warn", f"{temporary_folder()} takes no named pipes ({problem})", advice)
    if not token:
        return Check("disk", "ok", f"{folder}; whether other hosts see it was not tried: it cannot be written")
    with suppress(OSError):
        if Path(token).read_text() == text:
            return Check("disk", "ok", f"{folder} is shared")
    advice = "bring script and data to each host at this path; what rank 0 saves stays on its host"
    return Check("disk", "warn", f"{folder} is another one than on the host of the doctor", advice)


def _no_pipes() -> str:
    """Why the temporary folder takes no named pipe; empty if it does, or if this process may not write there."""
    path = f"{temporary_folder()}/ring-doctor-{uuid.uuid4().hex}"
    try:
        os.mkfifo(path)
    except OSError as error:
        return "" if error.errno in (errno.EACCES, errno.EROFS) else os.strerror(error.errno or 0)
    os.unlink(path)
    return ""


def _network(others: Sequence[str]) -> tuple[str, float | None, Check]:
    """The interface that leads to the other hosts, the bytes per second that it claims, and the finding."""
    name = config().interface or interface_towards(others)
    if not name:
        unknown = f"no route to {', '.join(others)}"
        advice = "put their names into /etc/hosts or the DNS, or name the interface with RING_INTERFACE"
        return "", None, Check("network", "fail", unknown, advice)
    if not (_INTERFACES / name).exists():
        advice = f"RING_INTERFACE must name one of {', '.join(sorted(os.listdir(_INTERFACES)))}"
        return "", None, Check("network", "fail", f"there is no interface {name}", advice)
    if name == "lo":
        advice = f"give {others[0]} its own address in /etc/hosts or the DNS of this host"
        return name, None, Check("network", "fail", f"{others[0]} leads to this host itself", advice)
    megabits = 0
    # A veth, a bridge or a tunnel claims 10 Gbit/s, whatever carries it.
    is_real = any((_INTERFACES / name / kind).exists() for kind in ("device", "bonding"))
    if is_real:
        megabits = number_in(_INTERFACES / name / "speed") or 0
    claim = f"{megabits / 1000:g} Gbit/s" if megabits > 0 else f"{'' if is_real else 'virtual, '}of unknown speed"
    rdma = f", and RDMA by {', '.join(sorted(os.listdir(RDMA)))}" if RDMA.is_dir() and any(RDMA.iterdir()) else ""
    return name, megabits * 125e3 if megabits > 0 else None, Check("network", "ok", f"{name}, {claim}{rdma}")


if __name__ == "__main__":
    main()
