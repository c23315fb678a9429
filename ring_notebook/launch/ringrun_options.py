"""The command line of ``ringrun``: its own options, and those of ``horovodrun`` with what becomes of each."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from ring_notebook import __version__
from ring_notebook.analysis.prediction import ScalingOptions
from ring_notebook.analysis.scaling import rank_counts
from ring_notebook.config import config
from ring_notebook.horovod.as_horovod import variables
from ring_notebook.launch.launchers.hosts import Host, discovered_hosts, named_hosts
from ring_notebook.launch.remote.remote_shell import ssh_command
from ring_notebook.launch.supervisor.growth import Elastic
from ring_notebook.rank.rank_threads import OMP
from ring_notebook.text.line_options import options_of, read_by

_CYCLES, _FIRST_IN_HOSTS = "there are no cycles", "ranks of a host always reduce in memory that they share, first"
_TUNING, _LOGS = "buckets are planned from the model, and nothing is tuned", "the core writes no log"
_MPI, _CONTROLLER = (
    "MPI moves tensors only where a site's launcher started the ranks",
    "there is no controller to choose",
)
_STALL = ("--stall-check-warning-time-seconds", "--stall-check-shutdown-time-seconds")
_IDLE: tuple[tuple[tuple[str, ...], int, str], ...] = (
    (("--disable-cache",), 0, "no check is kept from one job to the next"),
    (("--cycle-time-ms",), 1, _CYCLES),
    (("--cache-capacity",), 1, "there is no negotiation to cache"),
    (("--hierarchical-allreduce", "--no-hierarchical-allreduce"), 0, _FIRST_IN_HOSTS),
    (("--hierarchical-allgather", "--no-hierarchical-allgather"), 0, _FIRST_IN_HOSTS),
    (("--autotune", "--no-autotune"), 0, _TUNING),
    (("--autotune-log-file", "--autotune-warmup-samples", "--autotune-steps-per-sample"), 1, _TUNING),
    (("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"), 1, _TUNING),
    (("--timeline-mark-cycles", "--no-timeline-mark-cycles"), 0, _CYCLES),
    (("--mpi-threads-disable", "--no-mpi-threads-disable"), 0, _MPI),
    (("--num-nccl-streams",), 1, "each group has one stream"),
    (("--thread-affinity",), 1, "the progress thread is bound to no core"),
    (("--gloo-timeout-seconds",), 1, "Gloo moves nothing; --stall-check-shutdown-time-seconds ends waits"),
    (("--log-level",), 1, _LOGS),
    (("--log-with-timestamp", "--log-without-timestamp"), 0, _LOGS),
    (("--log-hide-timestamp", "--no-log-hide-timestamp"), 0, _LOGS),
    (("--gloo", "--mpi"), 0, _CONTROLLER),
)
"""Options of ``horovodrun`` that mean nothing here, how many values each takes, and why."""


class _Parser(argparse.ArgumentParser):
    """Suggests the option that an unknown one may mean."""

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ")
        known, near = list(self._option_string_actions), []
        if words != message:
            word = words.split()[0]
            begun = [one for one in known if one.startswith(word)] if word.startswith("--") else []
            near = difflib.get_close_matches(word, known, 1, 0.7) or begun
        super().error(f"{message}; did you mean: {near[0]}" if near else message)


class _Idle(argparse.Action):
    """Notes that an option has no effect, and why."""

    def __call__(self, _parser: object, options: argparse.Namespace, _values: object, flag: str | None = None) -> None:
        options.idle = [*options.idle, f"{flag} has no effect: {self.const}"]


class _Interfaces(argparse.Action):
    def __call__(self, _parser: object, options: argparse.Namespace, values: Any, _flag: str | None = None) -> None:
        options.interfaces = [*options.interfaces, *(name for name in str(values).split(",") if name)]


def parse(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The parser, for errors, and the options of ``argv``; those of a ``--config-file`` are read before."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.config_file:
        try:
            words = config_words(_read_yaml(options.config_file))
        except (OSError, ValueError) as error:
            parser.error(f"--config-file {options.config_file}: {error}")
        options = parser.parse_args([*words, *argv])
    if options.command[:1] == ["--"]:
        del options.command[0]
    if options.doctor or options.check_build:
        others = [flag for flag in _given(parser, options) if flag not in _OF_DOCTOR]
        if others:
            parser.error(f"--doctor starts no program, and takes no {others[0]}; it takes hosts (-H, --hostfile)")
    elif options.json:
        parser.error("--json is an option of --doctor")
    given = list(_given(parser, options))
    if options.scale:
        if others := [flag for flag in given if flag in _NOT_SCALED]:
            parser.error(f"--scale sets the ranks of each run, which stay the same; leave out {others[0]}")
    elif others := [flag for flag in given if flag in _OF_SCALE]:
        parser.error(f"{others[0]} is an option of --scale; for example: ringrun --scale 1,2,4 python train.py")
    return parser, options


_OF_DOCTOR = (
    *("--doctor", "-cb", "--json", "--verbose", "-H", "-hostfile", "--host-discovery-script", "--slots-per-host"),
    *("-p", "-i", "--network-interface", "--tcp"),
)
"""Options that go with --doctor, by their first names."""


_OF_SCALE = [one.flags[0] for one in options_of(ScalingOptions)]
_NOT_SCALED = (
    "-np",
    "--elastic",
    "--min-np",
    "--max-np",
    "--elastic-timeout",
    "--reset-limit",
    "--host-discovery-script",
)


def _given(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Iterator[str]:
    """The options that differ from their defaults, by their first names."""
    for action in parser._actions:
        if action.dest != "idle" and getattr(options, action.dest, action.default) not in (action.default, []):
            yield action.option_strings[0] if action.option_strings else action.dest
    if options.idle:
        yield options.idle[0].split()[0]


def check_values(options: argparse.Namespace) -> None:
    """Raise ValueError for a value that an option cannot have, and for two options of which one would be ignored."""
    least = {
        **dict.fromkeys(("np", "ppn", "cpus_per_rank", "logical", "slots_per_host", "ssh_port"), 1),
        **dict.fromkeys(("start_timeout", "stall_warning", "stall_shutdown", "fusion_threshold_mb", "reset_limit"), 0),
        "elastic_timeout": 0,
    }
    for name, lowest in least.items():
        value = getattr(options, name)
        if value is not None and not value >= lowest:  # `not >=`, so that NaN fails too
            flag = {"np": "-np"}.get(name) or f"--{name.replace('_', '-')}"
            flag = {"--stall-warning": _STALL[0], "--stall-shutdown": _STALL[1]}.get(flag, flag)
            seconds = " seconds" if isinstance(value, float) else ""
            raise ValueError(f"{flag} must be at least {lowest}{seconds}, got {value:g}")
    if options.logical and max(options.np or 0, options.max_np or 0) > options.logical:
        most, flag = (options.np, "-np") if (options.np or 0) > options.logical else (options.max_np, "--max-np")
        raise ValueError(f"--logical must be at least {flag}, got {options.logical} and {most}")
    if options.cooldown and not 0 <= options.cooldown[0] <= options.cooldown[1]:
        given = " ".join(f"{seconds:g}" for seconds in options.cooldown)
        raise ValueError(f"--blacklist-cooldown-range takes the least and the most seconds, got {given}")
    if not (options.ssh_port or options.ssh_identity_file):
        return
    if config().remote_shell:
        raise ValueError("-p and -i are options of ssh, and RING_REMOTE_SHELL names another command; put them there")
    if config().mpiexec or options.mpi_args or options.binding_args or options.jsrun:
        raise ValueError("-p and -i: the mpiexec connects to the hosts itself; give it its own options by --mpi-args")


def environment(options: argparse.Namespace) -> dict[str, str]:
    """The variables that the options stand for, without those of the caller."""
    env = variables() if options.horovod else {}
    settings = {
        "RING_TIMELINE": options.timeline_filename,
        "RING_TRACE_ON_ERROR": options.trace_on_error and os.path.abspath(options.trace_on_error),
        "RING_TRANSPORT": "tcp" if options.tcp else None,
        "RING_INTERFACE": options.interfaces[0] if options.interfaces else None,
        "RING_STALL_WARNING": "0" if options.no_stall_check else options.stall_warning,
        "RING_TIMEOUT": options.stall_shutdown,
        "RING_START_TIMEOUT": options.start_timeout,
        OMP: options.cpus_per_rank,
        "RING_LOGICAL": options.logical,
        "RING_WARMUP": None if options.doctor or options.check_build else options.warmup,
    }
    env |= {name: str(value) for name, value in settings.items() if value is not None}
    if options.fusion_threshold_mb is not None:
        env["RING_FUSION_THRESHOLD"] = str(options.fusion_threshold_mb << 20)
    if options.ssh_port or options.ssh_identity_file:
        env["RING_REMOTE_SHELL"] = shlex.join(ssh_command(options.ssh_port, options.ssh_identity_file))
    return env


def elastic_rules(options: argparse.Namespace, n: int) -> Elastic:
    """The rules of the job, which begins with ``n`` ranks. Raises ValueError for numbers that do not go together."""
    min_np = 1 if options.min_np is None else options.min_np
    if not 1 <= min_np <= n:
        raise ValueError(f"--min-np must be between 1 and the {n} ranks of the job, got {min_np}")
    asked = options.elastic or options.min_np is not None or options.max_np is not None  # as horovodrun
    if options.reset_limit == 0 or not (asked or options.host_discovery_script):
        return Elastic()
    if options.max_np is not None and options.max_np < n:
        raise ValueError(f"--max-np must be at least the {n} ranks that the job begins with, got {options.max_np}")
    given = {"patience": options.elastic_timeout, "cooldown": options.cooldown and tuple(options.cooldown)}
    return Elastic(
        min_np,
        options.max_np or (options.host_discovery_script and options.logical) or 0,
        options.host_discovery_script or "",
        options.slots_per_host,
        **{name: value for name, value in given.items() if value is not None},
    )


def notes(options: argparse.Namespace, here: bool) -> list[str]:
    """A line for each option that has no effect, or less than it says; ``here``: all ranks are on this host."""
    lines = list(options.idle)
    if options.interfaces and not here and len(options.interfaces) > 1:
        lines.append(f"ranks connect through one network interface of each host: {options.interfaces[0]} is taken")
    between_hosts = {
        "--network-interface": options.interfaces,
        "-p": options.ssh_port,
        "-i": options.ssh_identity_file,
        "--tcp": options.tcp,
    }
    if here:
        lines += [f"{flag} has no effect: all ranks are on this host" for flag, given in between_hosts.items() if given]
    return lines


def hosts_of(options: argparse.Namespace) -> list[Host]:
    """The hosts that the user has named, in whatever way; empty for none. Raises ValueError and OSError."""
    named = named_hosts(options.hosts, options.hostfile, options.slots_per_host)
    if options.host_discovery_script and not named:
        return discovered_hosts(options.host_discovery_script, options.slots_per_host)
    return named


def config_words(given: Mapping[str, Any]) -> list[str]:
    """The options that a configuration file of ``horovodrun`` stands for.

    ``{"timeline": {"filename": "t"}, "autotune": {"enabled": True}}`` gives ``["--timeline-filename", "t",
    "--autotune"]``. Raises ValueError for what is no option.
    """
    words: list[str] = []
    for section, values in given.items():
        if section == "controller":
            words.append(f"--{str(values).lower()}")
            continue
        if section not in _SECTIONS or not isinstance(values, Mapping):
            raise ValueError(f"expected sections {', '.join(_SECTIONS)} and controller, got {section!r}")
        for name, value in values.items():
            flag = f"--{_SECTIONS[section]}{name}".replace("_", "-")
            if name == "enabled":
                flag = f"--{section}".replace("_", "-")
            if isinstance(value, bool):
                words.append(flag if value else flag.replace("--", "--no-", 1))
            elif value is not None:
                words += [flag, str(value)]
    return [_WITHOUT_TIMES if word == "--no-log-with-timestamp" else word for word in words]


_SECTIONS = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall_check": "stall-check-",
    "library_options": "",
    "logging": "log-",
}
"""Sections of a configuration file of ``horovodrun``, and how the options of each begin."""
_WITHOUT_TIMES = "--log-without-timestamp"


def _read_yaml(path: str) -> Mapping[str, Any]:
    if find_spec("yaml") is None:
        raise ValueError("reading it needs PyYAML; `pip install 'ring-notebook[yaml]'`, or give the options themselves")
    import yaml  # type: ignore[import-untyped]

    try:
        found = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(found, Mapping):
        raise ValueError("expected sections, such as 'timeline:' with 'filename: trace.json' below it")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ringrun",
        description="Start a program on several ranks, as horovodrun does.",
        usage="ringrun -np N [options] command ...",
        allow_abbrev=False,
    )
    parser.set_defaults(idle=[], interfaces=[])
    add = parser.add_argument
    add("-np", "--num-proc", dest="np", type=int, metavar="N", help="number of ranks")
    add("--ppn", type=int, metavar="N", help="ranks on each host, whatever its slots")
    add("--cpus-per-rank", type=int, metavar="N", help="cores that each rank computes with (OMP_NUM_THREADS)")
    add(
        "--logical",
        type=int,
        metavar="L",
        help="train as L ranks would, on any number of ranks (`prepare(logical=L)`)",
    )
    add("-v", "--version", action="version", version=f"ringrun {__version__}")
    add("--doctor", action="store_true", help="check this machine, or all of -H or an allocation: what to repair")
    add("--json", action="store_true", help="what --doctor finds, for tools")
    add("-cb", "--check-build", action="store_true", help="the same (Horovod's name)")
    add("--verbose", action="store_true", help="print the allocation and the command line of the launcher")
    add("--horovod", action="store_true", help="make `import horovod` mean Ring Notebook in the ranks")
    add("--config-file", metavar="FILE", help="read options from a YAML file of horovodrun; others go before them")
    add("--timeline-filename", metavar="FILE", help="write a Chrome trace of the collectives")
    add("--trace-on-error", metavar="FILE", help="if the job fails, write the last operations of all ranks")
    add("--fusion-threshold-mb", type=int, metavar="MIB", help="size of a gradient bucket")
    add(
        "--start-timeout", type=float, metavar="S", help="seconds to start all ranks, for mpiexec, srun and other hosts"
    )

    group = parser.add_argument_group("hosts")
    add, where = group.add_argument, group.add_mutually_exclusive_group()
    where.add_argument(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,...",
        help="the hosts, such as 'n[01-04]:8', and how many ranks each may run",
    )
    where.add_argument("-hostfile", "--hostfile", metavar="FILE", help="the same, one host a line: 'a slots=2'")
    where.add_argument(
        "--here", action="store_true", help="this host alone, also a login node, or one of an allocation"
    )
    add("--host-discovery-script", metavar="COMMAND", help="a program that prints the hosts; it is asked every second")
    add("--slots-per-host", type=int, default=1, metavar="N", help="slots of hosts that are named without a number")
    add("-p", "--ssh-port", type=int, metavar="PORT", help="port of ssh on all hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    for flag in ("--network-interface", "--network-interfaces"):
        add(flag, action=_Interfaces, dest="interfaces", metavar="NAME", help="interface that ranks connect through")
    add("--tcp", action="store_true", help="connect hosts by TCP, also where they have RDMA devices")

    add = parser.add_argument_group("output").add_argument
    add("--no-prefix", action="store_true", help="print lines without the rank they come from")
    times = ("-prefix-timestamp", "--prefix-output-with-timestamp")
    add(*times, action="store_true", dest="times", help="print the time before each line")
    directory = ("--output-dir", "--output-filename")
    add(*directory, dest="output_dir", metavar="DIR", help="also write DIR/rank.N/stdout and stderr of each rank")

    add = parser.add_argument_group("elastic jobs").add_argument
    add("--elastic", action="store_true", help="continue without ranks that die (see elastic.run)")
    add("--min-np", "--min-num-proc", type=int, metavar="K", help="the same, while so many ranks are left")
    add("--max-np", "--max-num-proc", type=int, metavar="M", help="start ranks again, and others, up to so many")
    add("--elastic-timeout", type=float, metavar="S", help="seconds to wait for ranks while fewer than --min-np live")
    cooldown = "--blacklist-cooldown-range"
    add(cooldown, type=float, nargs=2, dest="cooldown", metavar="S", help="a host rests after a failure: least, most")
    add("--reset-limit", type=int, metavar="N", help="0: the first failure ends the job; others are not counted")

    add = parser.add_argument_group("waits").add_argument
    add("--no-stall-check", action="store_true", help="never say which ranks others wait for")
    add("--stall-check", action="store_false", dest="no_stall_check", default=False, help=argparse.SUPPRESS)
    add(_STALL[0], type=float, dest="stall_warning", metavar="S", help="seconds until a wait is reported")
    add(_STALL[1], type=float, dest="stall_shutdown", metavar="S", help="seconds until a wait raises")

    group = parser.add_argument_group("scaling")
    kind = group.add_mutually_exclusive_group()
    group.add_argument(
        "--scale", type=read_by(rank_counts), metavar="1,2,4", help="run the program on so many ranks, and compare"
    )
    for one in options_of(ScalingOptions):
        one.add_to(kind if one.exclusive else group)

    add = parser.add_argument_group("launchers of a site").add_argument
    add("--mpi-args", default="", metavar="ARGS", help="more options for mpiexec, quoted as for a shell")
    add("--binding-args", default="", metavar="ARGS", help="the same, for options that bind ranks to cores")
    add("--jsrun", action="store_true", help="start the ranks with jsrun")

    without_effect = "options of horovodrun that have no effect here"
    group = parser.add_argument_group(without_effect, "Each is accepted, and a line says why.")
    for flags, values, why in _IDLE:
        for flag in flags:
            group.add_argument(
                flag,
                action=_Idle,
                nargs=values,
                const=why,
                dest="idle",
                default=argparse.SUPPRESS,
                help=why,
                metavar="X",
            )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="program and arguments")
    return parser
