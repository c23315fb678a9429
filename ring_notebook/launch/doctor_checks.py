"""What the doctor checks on one host: everything that a run needs, and what to do about what is wrong."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

from ring_notebook import config as settings
from ring_notebook.errors import RingError
from ring_notebook.launch.connections.mpi_host import SHM, mpich_problem, needed_memory
from ring_notebook.launch.gpu_check import check_gpus
from ring_notebook.launch.launchers.find_launcher import find_launcher
from ring_notebook.launch.launchers.launcher import loaded_mpi
from ring_notebook.launch.supervisor.inherited_variables import without_outer_job
from ring_notebook.launch.supervisor.stderr_reports import split_reports
from ring_notebook.machine.gpus import gpus
from ring_notebook.machine.hardware import cores
from ring_notebook.machine.os_calls import resource_limits, substitutes
from ring_notebook.machine.own_python import code_command, module_command
from ring_notebook.rank.rank_threads import threads_set

_GIB = 1 << 30
_MOST_RANKS = 8  # that measure allreduce where no number is given
_SECONDS_TO_START = 60.0
_SECONDS_TO_SUM = 2.5
_FAIR_SHARE = 0.5  # of what the hardware should give
_WIDGETS = ("@jupyter-widgets/jupyterlab-manager", "ipecharts")


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what it found, and what to do unless ``status`` is ok. ``host`` is empty for one of all hosts."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""
    host: str = ""


def diagnose(slots: int = 0) -> list[Check]:
    """Run all checks that need no other host, for ``slots`` ranks; 0: as many as a cluster has by default.

    Without the core, checks that would fail for the same reason are left out. Takes a few seconds: MPI, torch and GPUs
    are really used.
    """
    found = check_system()
    if starts_no_rank(found):
        return found
    return [*found, *map(_guarded, _LOOKS), _guarded(partial(_cores, slots), "cores")]


def starts_no_rank(checks: Sequence[Check]) -> bool:
    """Whether these checks have found no native core, or a system on which nothing starts."""
    return any(check.name in ("core", "system") and check.status == "fail" for check in checks)


def check_allreduce(slots: int) -> Check:
    """Have ranks of this host measure allreduce, against what its memory allows."""
    return _guarded(partial(_allreduce, slots), "allreduce")


def measure_allreduce(where: Sequence[str]) -> dict[str, float] | str:
    """What `core.allreduce_check` measures on the ranks that the options ``where`` of ringrun name, or why it fails."""
    program = module_command("ring_notebook.core.allreduce_check", str(_SECONDS_TO_SUM))
    command = module_command("ring_notebook.launch.cli", *where, *program)
    limit = 2 * _SECONDS_TO_SUM + _SECONDS_TO_START
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=limit,
            check=False,
            env=without_outer_job(os.environ),
        )
    except subprocess.TimeoutExpired:
        return f"no result within {limit:g} s"
    measured = done.stdout.partition("{")  # behind the rank's number
    return json.loads("{" + measured[2]) if measured[1] and not done.returncode else _last_line(done)


def installed(package: str) -> str:
    """The version of a package that is installed; empty without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _guarded(look: Callable[[], Check], name: str = "") -> Check:
    try:
        return look()
    except (RingError, OSError, ValueError, subprocess.SubprocessError) as error:
        name = name or getattr(look, "__name__", "").strip("_")
        return Check(name, "fail", str(error), "repair this first, then run the doctor again")


def _allreduce(slots: int) -> Check:
    ranks = slots or min(_MOST_RANKS, max(2, cores()))
    if ranks < 2:
        return Check("allreduce", "ok", "one rank, which moves nothing on this host")
    # Named, because in an allocation the ranks would go to all of its hosts.
    measured = measure_allreduce(["-np", str(ranks), "-H", f"localhost:{ranks}"])
    if isinstance(measured, str):
        advice = f"`ringrun -np {ranks} python -c 'import ring_notebook.torch as hvd; hvd.init()'` may show more"
        return Check("allreduce", "fail", f"{ranks} ranks of this host cannot sum: {measured}", advice)
    if "memory" not in measured:
        found = f"{ranks} ranks of this host take one another for ranks of other hosts, and use TCP"
        advice = "start them all in one container: ranks share memory within one process and one network namespace"
        return Check("allreduce", "warn", found, advice)
    # Each rank reads a part of all inputs, and writes it to all outputs: two bytes for each byte of a rank.
    limit = measured["memory"] / (2 * ranks)
    advice = "other programs may use its cores or memory: try again when it is idle, or start fewer ranks"
    return against_limit("allreduce", f"{ranks} ranks", measured["rate"], limit, "its memory allows", advice)


def against_limit(name: str, who: str, rate: float, limit: float, what: str, advice: str) -> Check:
    """A rate in bytes per second beside what the hardware should give."""
    share = rate / limit
    found = f"{who} sum at {rate / 1e9:.2g} GB/s, {share:.0%} of what {what} ({limit / 1e9:.2g} GB/s)"
    return Check(name, "ok", found) if share >= _FAIR_SHARE else Check(name, "warn", found, advice)


def _ask(code: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """The answer of a fresh Python: what it imports may be broken and stays out of this process."""
    return subprocess.run(code_command(code), capture_output=True, text=True, timeout=timeout, check=False)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    said, failures, _ = split_reports(done.stderr.encode())
    if failures:
        return failures[0].sentence
    last = (said.decode().strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return last.removeprefix("ringrun: ")


def _python() -> Check:
    return Check("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")


def check_system() -> list[Check]:
    """What the kernel or a sandbox refuses, and what takes its place: a line for each call."""
    try:
        missing = substitutes()
    except OSError as error:
        return [Check("system", "fail", str(error.strerror), "no rank starts without it")]
    return [Check("system", "ok", one) for one in missing or ["has every call that we use"]]


def _settings() -> Check:
    default = settings.Config()
    changed = [
        f"{name}={value}"
        for name in settings.Config.__slots__
        if (value := getattr(settings.config(), name)) != getattr(default, name)
    ]
    return Check("settings", "ok", ", ".join(changed) or "all at their defaults")


def _core() -> Check:
    done = _ask("from ring_notebook.core.native import core; print(core.isa())")
    if done.returncode:
        advice = "compile it: `pip install -e .` in a clone, or reinstall the wheel"
        if not any(map(shutil.which, ("c++", "g++", "clang++"))):
            advice = "install a C++17 compiler (`apt-get install g++ python3-dev`), then `pip install -e .` in a clone"
        return Check("core", "fail", _last_line(done), advice)
    return Check("core", "ok", f"compiled, kernels for {done.stdout.strip()}")


def _mpi() -> Check:
    if find_spec("mpi4py") is None and not settings.config().mpiexec:
        return Check("mpi", "ok", "none: ranks find each other without it (`ring-notebook[mpi]` brings one for mpi4py)")
    mpi = loaded_mpi()
    launcher = find_launcher()
    if not launcher.foreign and (problem := mpich_problem(2)):
        return Check("mpi", "warn", problem, f"only programs that import mpi4py need it; {_cure_of_mpi(problem)}")
    program = code_command("import os; from mpi4py import MPI; os.write(1, b'<size %d>' % MPI.COMM_WORLD.size)")
    done = subprocess.run(
        launcher.command(program, 2),
        env={**without_outer_job(os.environ), **launcher.environment()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = f"mpi4py loads {mpi}, {launcher} starts ranks"
    if done.returncode:
        package = "mpich" if mpi == "MPICH" else "mpi4py"
        advice = f"`pip install --force-reinstall {package}`, or set RING_MPIEXEC to an mpiexec of {mpi}"
        return Check("mpi", "fail", f"{found}; two ranks do not start: {_last_line(done)}", advice)
    sizes = re.findall(r"<size (\d+)>", done.stdout)  # MPI may print more, as it does with I_MPI_DEBUG
    if sizes != ["2", "2"]:
        wrong = f"{found} that found sizes {' '.join(sizes)}, expected 2 2"
        return Check("mpi", "fail", wrong, f"set RING_MPIEXEC to an mpiexec of {mpi}")
    return Check("mpi", "ok", f"{found}, two ranks connected")


def _cure_of_mpi(problem: str) -> str:
    if SHM not in problem:
        return "run these elsewhere"
    if not os.access(SHM, os.W_OK):
        return f"mount a tmpfs at {SHM} that you may write to"
    about = os.statvfs(SHM)
    large = about.f_blocks * about.f_frsize >= needed_memory(2)
    return "free space there" if large else "`docker run --shm-size=1g`, or a larger tmpfs there"


def _cores(slots: int = 0) -> Check:
    usable, present = cores(), os.cpu_count() or 1
    found = f"{usable} of {present} usable by this process"
    if usable == 1 and present > 1:
        return Check("cores", "warn", found, "give the container or `taskset` more, or ranks take turns on it")
    threads, ranks = threads_set(), slots or len(gpus()) or max(2, usable)
    if slots > max(usable, len(gpus())):
        return Check("cores", "warn", f"{found}, for {slots} ranks that take turns on them", "start fewer ranks here")
    if threads > 1 and threads * ranks > usable:
        each = f"OMP_NUM_THREADS or MKL_NUM_THREADS gives {ranks} ranks {threads} threads each"
        return Check("cores", "warn", f"{found}; {each}", "unset both: ranks then share the cores")
    return Check("cores", "ok", found)


def _memory() -> Check:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    found = f"{free / _GIB:.1f} GiB available"
    done = _ask("from ring_notebook.core.native import core; print(core.memory_left())")
    if done.returncode == 0 and (left := int(done.stdout)) < 0.9 * free:  # what is available changes all the time
        found = f"{left / _GIB:.1f} GiB left of what this container or job may use, {found} on the machine"
        free = left
    soft, _ = resource_limits(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        found += f", {soft / _GIB:.1f} GiB per process (ulimit -v)"
    if free < _GIB:
        return Check("memory", "warn", found, "each rank with torch takes about 0.3 GiB before it has a model")
    return Check("memory", "ok", found)


def _files() -> Check:
    soft, hard = resource_limits(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Check("files", "ok", "any number of open files allowed")
    if soft < 1024:
        return Check(
            "files", "warn", f"{soft} open files allowed", f"`ulimit -n {min(hard, 4096)}` before starting Jupyter"
        )
    return Check("files", "ok", f"{soft} open files allowed")


def _torch() -> Check:
    done = _ask("import torch; print(torch.__version__, torch.cuda.is_available())", timeout=120)
    if done.returncode:
        if find_spec("torch") is None:
            return Check("torch", "warn", "not installed", "`pip install 'ring-notebook[torch]'` to train with PyTorch")
        return Check("torch", "fail", _last_line(done), "`pip install torch`")
    version, cuda = done.stdout.split()
    devices = gpus()
    found = f"{version}, {len(devices)} GPUs"
    requires = map(Requirement, importlib.metadata.requires("ring-notebook") or ())
    needed = next(one for one in requires if one.name == "torch")
    if not needed.specifier.contains(Version(version).base_version):
        found += f", but Ring Notebook needs torch{needed.specifier}"
        return Check("torch", "fail", found, "`pip install -U torch`")
    if devices and cuda != "True":
        return Check("torch", "warn", f"{found}, but this torch cannot use them", "install a CUDA build of torch")
    return Check("torch", "ok", found)


def _gpus() -> Check:
    return Check("gpus", *check_gpus())


def _notebook() -> Check:
    done = _ask("from jupyter_core.paths import jupyter_path; print(*jupyter_path('labextensions'), sep='\\n')")
    folders = [Path(line) for line in done.stdout.splitlines()]
    missing = [name for name in _WIDGETS if not any((folder / name).is_dir() for folder in folders)]
    version = installed("jupyterlab")
    found = f"JupyterLab {version}" if version else "no JupyterLab in this environment"
    if missing:
        advice = "`pip install ipywidgets ipecharts` where Jupyter runs, then reload the page"
        return Check("notebook", "warn", f"{found}, without {', '.join(missing)}", advice)
    return Check("notebook", "ok", f"{found}, widgets and charts installed")


_LOOKS = (_python, _settings, _core, _mpi, _memory, _files, _torch, _gpus, _notebook)
