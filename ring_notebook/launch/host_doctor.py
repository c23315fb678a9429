"""The doctor's part on one host, started by `doctor_of_hosts` as an agent is: ``python -m ...host_doctor``.

It says that it is there, tells the time when asked, reads one line of JSON, and answers with one: its checks, and what
is compared between hosts. Lines begin with `MARK`, because a shell may print lines of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ring_notebook import __version__
from ring_notebook.config import config
from ring_notebook.launch.doctor import Check, check_allreduce, diagnose, installed
from ring_notebook.launch.remote.network import interface_towards

MARK = "ring-doctor: "
_INTERFACES = Path("/sys/class/net")
_RDMA = Path("/sys/class/infiniband")


def main() -> None:
    """Serve the doctor at the other end of standard input and output."""
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
    sys.__stdout__.write(f"{MARK}{text}\n")  # type: ignore[union-attr]
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
    with contextlib.suppress(OSError):
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
    with contextlib.suppress(OSError, ValueError):  # of a wireless one, for example
        megabits = int((_INTERFACES / name / "speed").read_text())
    said = f"{megabits / 1000:g} Gbit/s" if megabits > 0 else "of unknown speed"
    rdma = f", and RDMA by {', '.join(sorted(os.listdir(_RDMA)))}" if _RDMA.is_dir() and any(_RDMA.iterdir()) else ""
    return name, megabits * 125e3 if megabits > 0 else None, Check("network", "ok", f"{name}, {said}{rdma}")


if __name__ == "__main__":
    main()
