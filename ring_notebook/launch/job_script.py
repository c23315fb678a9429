"""The script of a batch job: what a user asks for, put into the template of a site.

A site is a TOML file, ``~/.config/ring_notebook/sites/NAME.toml`` or one of those in ``sites/`` beside this module. It
has the ``system``, default values, ``setup`` (lines of shell that run before the command), ``job`` (the template) and a
table ``environment`` of variables.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ring_notebook.launch.batch_commands import SYSTEMS, BatchError, BatchSystem
from ring_notebook.text.words import plural

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SHIPPED = Path(__file__).with_name("sites")
_PLACE = re.compile(r"(?<!\$)\{(?:([^{}]+=))?([a-z_]+)\}")
_TIME = re.compile(r"(?:(\d+):)?(\d{1,3}):(\d\d)$|(\d+)\s*(s|m|min|h)$")
_PLAIN = re.compile(r"[\w@+=./-]*")  # a path that every batch system takes as it is
_LEAST_TO_QUARTER = 240  # seconds; scripts count minutes
_KINDS = {"system": str, "hosts": int, "gpus": int, "per_host": int, "time": str, "queue": str, "account": str}
_KINDS |= {"setup": str, "job": str, "environment": dict}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A job for ``n`` ranks on ``hosts``, with ``gpus`` on each host, for ``time`` as ``H:MM:SS``."""

    site: str
    system: str
    hosts: int
    n: int
    gpus: int
    time: str
    queue: str
    account: str
    requeue: bool
    setup: str
    job: str
    environment: dict[str, str]

    @property
    def batch_system(self) -> BatchSystem:
        return SYSTEMS[self.system]

    @property
    def per_host(self) -> int:
        """Ranks on a host; the last may have fewer."""
        return -(-self.n // self.hosts)

    @property
    def seconds(self) -> int:
        hours, minutes, seconds = map(int, self.time.split(":"))
        return hours * 3600 + minutes * 60 + seconds

    def smaller(self) -> dict[str, BatchRequest]:
        """Requests for half of the hosts and for a quarter of the time, by the options that make them."""
        found = {}
        if hosts := self.hosts // 2:
            n = min(self.n, hosts * self.per_host)
            found[f"-N {hosts} -n {n}"] = replace(self, hosts=hosts, n=n)
        if self.seconds >= _LEAST_TO_QUARTER:
            time = _clock(f"{-(-self.seconds // 240)}m")
            found[f"--time {time}"] = replace(self, time=time)
        return found

    def script(self, command: Sequence[str], output: Path, name: str = "ring_notebook") -> str:
        """The script that runs ``command`` in a job, which writes to ``output``.

        A line of the template with an empty value is left out; of a line with ``{:ngpus=gpus}``, only this piece.
        """
        path, redirect = str(output), []
        if not _PLAIN.fullmatch(path):
            path = self.batch_system.quote_path(path)
            if not path:
                path, redirect = "/dev/null", [f"exec >{shlex.quote(str(output))} 2>&1"]
        exports = [f"export {k}={shlex.quote(v)}" for k, v in self.environment.items()]
        values = {
            "name": name,
            "hosts": str(self.hosts),
            "n": str(self.n),
            "per_host": str(self.per_host),
            "gpus": str(self.gpus or ""),
            "time": self.time,
            "minutes": str(-(-self.seconds // 60)),
            "queue": self.queue,
            "account": self.account,
            "requeue": self.batch_system.requeue[self.requeue],
            "output": path,
            "folder": shlex.quote(os.getcwd()),
            "setup": "\n".join([*redirect, *exports, self.setup]),
            "command": shlex.join(command),
        }
        lines = []
        for line in self.job.strip().split("\n"):
            found = [match for match in _PLACE.finditer(line) if match[2] in values]
            if all(values[match[2]].strip() or match[1] for match in found):
                lines.append(_PLACE.sub(lambda match: _filled(match, values), line).strip("\n"))
        return "\n".join(lines) + "\n"


def _filled(match: re.Match[str], values: Mapping[str, str]) -> str:
    if match[2] not in values:
        return match[0]
    value = values[match[2]]
    return f"{match[1] or ''}{value}" if value else ""


def sites() -> dict[str, Path]:
    """The files of all sites by name: those of the user take the place of ours."""
    own = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "ring_notebook" / "sites"
    return {path.stem: path for folder in (_SHIPPED, own) for path in sorted(folder.glob("*.toml"))}


def batch_request(
    site: str,
    *,
    hosts: int | None = None,
    n: int | None = None,
    gpus: int | None = None,
    time: str = "",
    queue: str = "",
    account: str = "",
    requeue: bool = False,
    ran_with: int = 1,
) -> BatchRequest:
    """A request to a site, which has the defaults.

    Without ``n`` each host has ``per_host`` ranks of the site, else one for each GPU. Without these there are as many
    ranks as the cell ``ran_with``, at least one a host.
    Raises BatchError for an unknown site, a file that cannot be read, and values that make no sense.
    """
    known = sites()
    if site not in known:
        raise BatchError(f"no site {site!r}; known are {', '.join(sorted(known))}")
    defaults = _read(known[site])
    hosts = hosts or int(defaults.get("hosts", 1))
    gpus = defaults.get("gpus", 0) if gpus is None else gpus
    n = n or hosts * (defaults.get("per_host") or gpus) or max(ran_with, hosts)
    if n < hosts:
        raise BatchError(f"{plural(n, 'rank')} cannot fill {hosts} hosts; ask for fewer hosts (-N) or more ranks (-n)")
    values = {"queue": queue or defaults.get("queue", ""), "account": account or defaults.get("account", "")}
    if wrong := [value for value in values.values() if not value.isprintable() or value.startswith("-")]:
        raise BatchError(f"{wrong[0]!r} can be no queue or account")
    return BatchRequest(
        site=site,
        system=defaults["system"],
        hosts=hosts,
        n=n,
        gpus=gpus,
        time=_clock(time or defaults.get("time", "1:00:00")),
        requeue=requeue,
        setup=defaults.get("setup", ""),
        job=defaults["job"],
        environment={name: str(value) for name, value in defaults.get("environment", {}).items()},
        **values,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BatchError(f"{path}: {error}") from None
    for name, value in table.items():
        if not isinstance(value, _KINDS.get(name, ())):
            expected = f"a value of type {_KINDS[name].__name__}" if name in _KINDS else f"one of {', '.join(_KINDS)}"
            raise BatchError(f"{path}: {name}: expected {expected}")
    if missing := {"system", "job"} - table.keys():
        why = f"{path}: {' and '.join(sorted(missing))} missing"
        raise BatchError(f"{why}; begin with a copy of {_SHIPPED / 'slurm.toml'}")
    if table["system"] not in SYSTEMS:
        raise BatchError(f"{path}: system = {table['system']!r}; expected one of {', '.join(SYSTEMS)}")
    return table


def _clock(text: str) -> str:
    """A duration as ``H:MM:SS``: of ``2:00:00``, ``2h``, ``90m`` or ``90 min``. Raises BatchError for any other."""
    match = _TIME.match(text.strip())
    if match and match[4]:
        seconds = int(match[4]) * {"s": 1, "h": 3600}.get(match[5], 60)
    elif match and match[1]:
        seconds = int(match[1]) * 3600 + int(match[2]) * 60 + int(match[3])
    else:
        raise BatchError(f"--time: expected H:MM:SS, such as 2:00:00, or 2h or 90m, got {text!r}")
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
