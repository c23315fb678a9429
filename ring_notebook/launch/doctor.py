"""The doctor of all hosts of a job: visits each, compares them, and has ranks of all of them sum.

On each host it starts this module as a program, as an agent is started: that one says that it is there, tells the time
when asked, reads one line of JSON, and answers with one: its checks, and what is compared between hosts.
"""

from __future__ import annotations

import json
import os
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
from typing import Any

from ring_notebook import __version__
from ring_notebook.config import config
from ring_notebook.hardware import RDMA
from ring_notebook.launch.host_checks import (
    Check,
    against_limit,
    check_allreduce,
    diagnose,
    installed,
    measure_allreduce,
)
from ring_notebook.launch.launchers.hosts import Host, is_local, slots_by_name
from ring_notebook.launch.remote.network import interface_towards
from ring_notebook.launch.remote.remote_shell import agent_command
from ring_notebook.launch.supervisor.outer_job import without_outer_job
from ring_notebook.launch.supervisor.parent_death import wrap
from ring_notebook.own_python import module_command
from ring_notebook.verdict import SECONDS_TO_CONNECT, describe_exit

_SECONDS_TO_ANSWER = 240.0  # for all checks of a host: MPI, torch and GPUs are used, and a disk may be slow
_CLOCKS_APART = 1.0  # seconds from which the order of what ranks of two hosts report may be wrong
_MOST_VISITS = 64  # at a time
_MARK = "ring-doctor: "  # of each line, because a shell may print lines of its own
_INTERFACES = Path("/sys/class/net")
_PROGRAM = "ring_notebook.launch.doctor"
_SAME = "install the same environment at the same path on every host"


@dataclass(frozen=True)
class Visit:
    """What became of the visit to one host: its checks, and what is compared with other hosts.

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
    slots = slots_by_name(hosts or [Host(socket.gethostname(), 0)])
    text, token = uuid.uuid4().hex, Path(f".ring-doctor-{uuid.uuid4().hex}").absolute()
    started: list[subprocess.Popen[str]] = []
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
        token.unlink(missing_ok=True)
    checks = [check for visit in visits for check in visit.checks]
    there = [visit for visit in visits if visit.versions]
    if len(slots) > 1 and there:
        checks += compare(there)
    if len(there) > 1:
        checks.append(_between(there, {visit.host: max(1, slots[visit.host]) for visit in there}))
    return checks


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
    name: str, slots: Mapping[str, int], token: Path | None, text: str, started: list[subprocess.Popen[str]]
) -> Visit:
    """Run all checks on host ``name``; its process is added to ``started``."""
    command = module_command(_PROGRAM) if is_local(name) else agent_command(name, module=_PROGRAM)
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
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            return _unusable(name, f"{command[0]} does not start: {error.strerror}", command)
        started.append(process)
        with process:
            try:
                _answer(process, SECONDS_TO_CONNECT)
                began = time.time()
                _send(process, "now")
                clock = float(_answer(process, SECONDS_TO_CONNECT))
                ended = time.time()
                _send(process, json.dumps(given))
                answer: dict[str, Any] = json.loads(_answer(process, _SECONDS_TO_ANSWER))
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


def _send(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def _answer(process: subprocess.Popen[str], seconds: float) -> str:
    """The next line of the doctor on that host. Raises EOFError when none comes, in time."""
    assert process.stdout is not None
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        for line in process.stdout:
            if line.startswith(_MARK):
                return line.removeprefix(_MARK).strip()
    finally:
        timer.cancel()
    raise EOFError(f"no answer within {seconds:g} s" if late.is_set() else "")


def _unusable(name: str, why: str, command: Sequence[str]) -> Visit:
    advice = f"try it: {shlex.join(command[: command.index(name) + 1] if name in command else command[:1])} true"
    if "No module named" in why or "No such file" in why or "not found" in why:
        advice = _SAME
    return Visit(name, [Check("host", "fail", f"cannot be used: {why}", advice, name)])


def compare(visits: Sequence[Visit]) -> list[Check]:
    """What differs between hosts that has to be the same."""
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
    """Have ranks of all hosts sum, against what their network interfaces claim."""
    ranks, hosts = sum(slots.values()), len(visits)
    where = ",".join(f"{host}:{count}" for host, count in slots.items())
    measured = measure_allreduce(["-np", str(ranks), "-H", where])
    if isinstance(measured, str):
        advice = (
            "let the hosts connect to one another on all TCP ports (a firewall?), or name an interface that leads to "
            "all of them: --network-interface NAME, RING_INTERFACE"
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
    advice = (
        "measure the link itself, as with iperf3: a virtual interface may claim what it has not got; "
        "--network-interface NAME takes another one"
    )
    return against_limit(
        "between hosts", who, measured["rate"], limit, f"{slowest.interface} of {slowest.host} claims", advice
    )


def main() -> None:
    """Check this host for the doctor at the other end of standard input and output."""
    _say("ready")
    sys.stdin.readline()
    _say(repr(time.time()))
    given = json.loads(sys.stdin.readline())
    os.environ.clear()
    os.environ.update(given["environment"])
    config.cache_clear()
    checks = [_disk(given["folder"], given["token"], given["text"])]
    interface, speed = "", None
    if given["others"]:
        interface, speed, found = _network(given["others"])
        checks.append(found)
    checks = [*diagnose(given["slots"]), *checks, check_allreduce(given["slots"])]
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "versions": {"ring_notebook": __version__, "Python": sys.version.split()[0], "torch": installed("torch")},
        "interface": interface,
        "speed": speed,
    }
    _say(json.dumps({"checks": [asdict(check) for check in checks], "facts": facts}))


def _say(text: str) -> None:
    sys.__stdout__.write(f"{_MARK}{text}\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


def _disk(folder: str, token: str, text: str) -> Check:
    """Whether this host sees the folder of the job, and a file there that the first host has written."""
    try:
        os.chdir(folder)
    except OSError as error:
        advice = "ranks start in this folder: make it on each host, or start from a folder that all hosts share"
        return Check("disk", "fail", f"{folder}: {error.strerror}", advice)
    if not token:
        return Check("disk", "ok", f"{folder}; whether other hosts see it was not tried: it cannot be written")
    with suppress(OSError):
        if Path(token).read_text() == text:
            return Check("disk", "ok", f"{folder} is shared")
    advice = "bring script and data to each host at this path; what rank 0 saves stays on its host"
    return Check("disk", "warn", f"{folder} is another one than on the host of the doctor", advice)


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
    with suppress(OSError, ValueError):  # of a wireless one, for example
        megabits = int((_INTERFACES / name / "speed").read_text())
    claim = f"{megabits / 1000:g} Gbit/s" if megabits > 0 else "of unknown speed"
    rdma = f", and RDMA by {', '.join(sorted(os.listdir(RDMA)))}" if RDMA.is_dir() and any(RDMA.iterdir()) else ""
    return name, megabits * 125e3 if megabits > 0 else None, Check("network", "ok", f"{name}, {claim}{rdma}")


if __name__ == "__main__":
    main()
