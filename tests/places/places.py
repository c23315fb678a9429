"""The places in which we start: what each lacks, and how a test makes one. `docs/install.md` shows this table."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from harness.programs import ran
from ring_notebook.machine.os_calls import NO_PROC

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
CACHE = HERE.parents[1] / ".places"
"""What takes minutes to make, and stays."""
RUNS, SAYS_WHY = "runs", "an error says why"
LIMIT = 200.0  # seconds for one command, on a busy machine
_RINGRUN = str(Path(sys.executable).with_name("ringrun"))
COLUMNS: dict[str, tuple[list[str], str]] = {
    "ringrun": (
        [_RINGRUN, "--no-prefix", "-np", "2", sys.executable, "{programs}/job.py"],
        "job [0, 1] {3.0} 2 here",
    ),
    "run": ([sys.executable, "{programs}/function.py"], "run [(0, 2), (1, 2)]"),
    "cell": ([sys.executable, "{programs}/cell.py"], "cell ok ['[0, 1] 2']"),
}
"""What is started in each place, and what it prints."""
SUBSTITUTED = (
    "pidfd_open",
    "memfd_create",
    "eventfd2",
    "epoll_create1",
    "fallocate",
    "flock",
    "prctl",
    "prlimit64",
    "sched_getaffinity",
    "sendmsg",
    "mknodat",
)
"""Calls for which we have a substitute."""
UNUSED = (
    "close_range",
    "preadv2",
    "membarrier",
    "unshare",
    "clone3",
    "statx",
    "openat2",
    "faccessat2",
    "rseq",
    "mbind",
)
"""Calls that newer kernels have, and that Python and libraries do without when they get ENOSYS."""
NEEDED_ELSEWHERE = {"eventfd2": "ZeroMQ", "epoll_create1": "ZeroMQ", "fallocate": ""}
"""Calls without which a notebook's own library aborts: the cell is not tried. An empty text: it is tried."""


@dataclass(frozen=True)
class Place:
    """A place: its name, what it lacks and what takes the place of that, and how a command is started there.

    ``how`` says that in words; ``cell`` and ``script`` what becomes of a cell and of `ringrun` there.
    """

    name: str
    lacks: str
    how: str = ""
    wrap: Callable[[list[str], Path], list[str]] = lambda command, folder: command
    make: Callable[[], object] = lambda: None
    """Makes what stays of it, which takes as long as it takes; for a `dear` place."""
    environment: Mapping[str, str] | None = None
    cell: str = RUNS
    script: str = RUNS
    root: bool = False
    """Whether only root can make it."""
    group: bool = False
    """Whether it needs the control groups of `small_group`."""
    error: str = ""
    """A part of the error's text, where a cell or a script does not run."""
    dear: bool = False
    """Whether that takes minutes and downloads: only `make test-places` does."""

    @property
    def row(self) -> str:
        """The line of the documentation."""
        return f"| {self.name} | {self.lacks} | {self.how} | {self.cell} | {self.script} |"

    def call(self, column: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
        """Start a column of the table here, in ``folder``."""
        command, _ = COLUMNS[column]
        return self.start([word.format(programs=PROGRAMS) for word in command], folder, **more)

    def start(self, command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
        """Start a command here."""
        if self.root and os.geteuid() != 0:
            pytest.skip(f"NOT TESTED in {self.name}: needs root")
        given = {name: value.format(here=HERE) for name, value in (self.environment or {}).items()} | more
        paths = [given.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, **given, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return ran(self.wrap(command, folder), cwd=folder, env=environment, stdin=subprocess.DEVNULL, timeout=LIMIT)

    def check(self, column: str, folder: Path, **more: str) -> None:
        """Start a column here, and compare what it prints: what is documented."""
        done = self.call(column, folder, **more)
        if (self.cell if column == "cell" else self.script) == SAYS_WHY:
            assert self.error in done.stdout + done.stderr
            assert "Errno" not in done.stdout + done.stderr
            return
        assert done.returncode == 0, done.stdout + done.stderr
        assert COLUMNS[column][1] in done.stdout, done.stdout + done.stderr


def refusing(error: int, *names: str) -> Callable[[list[str], Path], list[str]]:
    """A filter that answers ``error`` to the calls of these names."""
    return lambda command, _: [sys.executable, str(HERE / "refusing.py"), str(error), ",".join(names), *command]


def _script(
    name: str, *unshare: str, arguments: Callable[[Path], list[str]] = lambda _: []
) -> Callable[..., list[str]]:
    def wrap(command: list[str], folder: Path) -> list[str]:
        return ["unshare", "--mount", *unshare, "sh", str(HERE / name), *arguments(folder), *command]

    return wrap


@contextmanager
def small_group(name: str) -> Iterator[None]:
    """Control groups ``name`` of 32 processes and half a core, of whichever version this machine has."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        limits = {root / name: {"pids.max": "32", "cpu.max": "50000 100000"}}
    else:
        cpu = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}
        limits = {root / "cpu" / name: cpu, root / "pids" / name: {"pids.max": "32"}}
    try:
        for folder, files in limits.items():
            folder.mkdir()
            for file, value in files.items():
                (folder / file).write_text(value)
    except OSError as error:
        pytest.skip(f"NOT TESTED in a small container: no control groups here ({error})")
    yield
    for folder in limits:
        folder.rmdir()


@lru_cache(maxsize=1)
def python_like_condas() -> str:
    """The interpreter that `like_conda.sh` compiles, for the packages of this one."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("NOT TESTED with a Python like conda's: its packages are those of a Python 3.11")
    if shutil.which("apt-get") is None:
        pytest.skip("NOT TESTED with a Python like conda's: it is compiled from Debian's sources")
    folder = CACHE / "python"
    subprocess.run([str(HERE / "like_conda.sh"), str(folder)], check=True)
    return str(folder / "python" / "bin" / "python3")


def _with_condas(command: list[str], _: Path) -> list[str]:
    python = python_like_condas()
    if command[0] == _RINGRUN:
        ringrun = "import sys; from ring_notebook.launch.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", ringrun, *command[1:]]
    return [python if word == sys.executable else word for word in command]


def _in_gvisor(command: list[str], folder: Path) -> list[str]:
    if shutil.which("runsc") is None:
        pytest.skip("NOT TESTED in gVisor: no runsc here; `apt-get install runsc`")
    return ["sh", str(HERE / "gvisor.sh"), str(folder), *command]


@dataclass(frozen=True)
class Root:
    """A bare system that `root.sh` makes: its debootstrap's name, and where that finds it."""

    suite: str
    mirror: str

    def make(self) -> None:
        """Download and compile; goes on where an earlier call has ended."""
        if os.geteuid() == 0:
            if shutil.which("debootstrap") is None:
                pytest.skip("NOT TESTED in a bare system: no debootstrap here; `apt-get install debootstrap`")
            command = [str(HERE / "root.sh"), self.suite, self.mirror, str(CACHE / self.suite)]
            subprocess.run(command, check=True)

    def __call__(self, command: list[str], folder: Path) -> list[str]:
        """The command in that system, with our programs and the framework of these tests, and ``folder`` at /mnt."""
        inside = "/work/environment/bin/"
        words = [inside + Path(word).name if "/bin/" in word else word for word in command]
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        begins = ["unshare", "--mount", "bash", str(HERE / "in_root.sh"), str(CACHE / self.suite / "root"), str(folder)]
        return [*begins, *paths, "--", *words]


class TooOld(Root):
    """A bare system whose own Python we do not run on: pip, which is to install this package there, says so."""

    def __call__(self, command: list[str], folder: Path) -> list[str]:
        """What pip says, whatever the command is."""
        return super().__call__(["/bin/pip", "install", "--no-deps", "/work/source"], folder)


DEBIAN, UBUNTU = "http://deb.debian.org/debian", "http://archive.ubuntu.com/ubuntu"
GROUP = f"ring-test-{os.getpid()}"
PLACES = (
    Place(
        "a Python built against old headers: conda, miniforge, uv before July 2026",
        "`os.pidfd_open`, `os.memfd_create`: called by number",
        "a `sitecustomize` that deletes the names",
        environment={"PYTHONPATH": "{here}/without_names"},
    ),
    Place(
        "a kernel before 5.3, as in RHEL 8; calls answer ENOSYS",
        "all calls of the list below",
        "a seccomp filter",
        wrap=refusing(38, *(name for name in SUBSTITUTED if name not in NEEDED_ELSEWHERE)),
    ),
    Place(
        "Docker's older seccomp profile, or a stricter one; calls answer EPERM",
        "all calls of the list below",
        "a seccomp filter",
        wrap=refusing(1, *(name for name in SUBSTITUTED if name not in NEEDED_ELSEWHERE)),
    ),
    Place(
        "gVisor's /proc over a Linux kernel",
        "`pid_max`, `threads-max` and `boot_id` of /proc/sys/kernel: other limits, and namespaces",
        "a mount over /proc/sys/kernel",
        wrap=_script("gvisor_proc.sh"),
        root=True,
    ),
    Place(
        "a user without a passwd entry, HOME, terminal, network and /dev/shm",
        "MPI, which cells withdraw",
        "namespaces, `setpriv`",
        wrap=_script("nobody.sh", "--net", arguments=lambda folder: [sys.base_prefix, str(folder)]),
        root=True,
    ),
    Place(
        "a container with 64 KiB of /dev/shm, a read-only root, half a core, 32 processes",
        "MPI, which cells withdraw. A notebook's cluster needs about 52 processes and threads",
        "namespaces, control groups",
        wrap=_script(
            "container.sh", "--pid", "--fork", "--ipc", "--uts", arguments=lambda folder: [GROUP, str(folder)]
        ),
        cell=SAYS_WHY,
        error="a cluster of 2 engines needs about 52 processes and threads, 32 are allowed here; allow more",
        root=True,
        group=True,
    ),
    Place(
        "gVisor (runsc of Debian 12), as in GKE Sandbox, Cloud Run and Modal",
        "pidfd_open, limits, boot id, names of namespaces, umask; MPI, which cells withdraw",
        "`runsc do`",
        wrap=_in_gvisor,
        root=True,
    ),
    Place(
        "a CPython compiled as conda's are",
        "`os.pidfd_open`, `os.memfd_create`: called by number",
        "compiled from Debian's sources",
        wrap=_with_condas,
        make=python_like_condas,
        dear=True,
        environment={"PYTHONPATH": "{here}/other_python", "RING_TEST_PACKAGES": sysconfig.get_path("purelib")},
    ),
    Place(
        "a bare Debian 11",
        "its own Python is 3.9, too old: bring a newer one",
        "debootstrap, pip there",
        wrap=TooOld("bullseye", DEBIAN),
        make=TooOld("bullseye", DEBIAN).make,
        cell=SAYS_WHY,
        script=SAYS_WHY,
        error="requires a different Python: 3.9",
        root=True,
        dear=True,
    ),
    *(
        Place(
            f"a bare {name}, its own Python and C library",
            "nothing",
            "debootstrap, compiled there by pip",
            wrap=root,
            make=root.make,
            root=True,
            dear=True,
        )
        for name, root in (
            ("Debian 12", Root("bookworm", DEBIAN)),
            ("Debian 13", Root("trixie", DEBIAN)),
            ("Ubuntu 22.04", Root("jammy", UBUNTU)),
            ("Ubuntu 24.04", Root("noble", UBUNTU)),
        )
    ),
)
HIDE_PROC = 'mount -t tmpfs none /proc && exec "$@"'
WITHOUT_PROC = Place(
    "no /proc is mounted",
    "nothing can take its place: the doctor says so too",
    "a mount over /proc",
    wrap=lambda command, _: ["unshare", "--mount", "sh", "-c", HIDE_PROC, "sh", *command],
    cell=SAYS_WHY,
    script=SAYS_WHY,
    error=NO_PROC,
    root=True,
)
