"""Fixtures for all tests, and the choice of plugin: inside a rank, or around the ranks."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from harness.forked_ranks import ForkServer
from harness.leftovers import Leftovers, own_shared_memory
from harness.numpy_framework import numpy_framework
from harness.protocol import FOLDER
from ring_notebook.config import config
from ring_notebook.machine.gpus import gpus

# Of jsonschema, with nbformat: grammars that no test needs, for which it would compile two seconds long.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
_IN_RANK = FOLDER in os.environ
_AROUND_RANKS = ("few_cases", "tenths", "rank_tests", "lanes", "after_failure")
pytest_plugins = ["harness.rank_side"] if _IN_RANK else [f"harness.{name}" for name in _AROUND_RANKS]


@pytest.fixture(scope="module", autouse=True)
def _no_leftovers() -> Iterator[None]:
    """After each file of tests: no process, shared memory, ring memory or port of ours is left."""
    if _IN_RANK:  # the launch looks after its ranks
        yield
        return
    before = Leftovers()
    yield
    assert not (complaints := before.complaints()), "\n".join(complaints)


@pytest.fixture
def settings() -> Iterator[Callable[..., None]]:
    """Sets RING_* variables for this test: ``settings(overlap="thread")``."""
    with pytest.MonkeyPatch.context() as patch:

        def change(**values: object) -> None:
            for name, value in values.items():
                patch.setenv(f"RING_{name.upper()}", str(value))
            config.cache_clear()

        yield change
    config.cache_clear()


@pytest.fixture(scope="session")
def numpy_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the package of `without_torch`."""
    return tmp_path_factory.mktemp("site")


@pytest.fixture(scope="module")
def without_torch(numpy_site: Path) -> Iterator[None]:
    """The engines that a file starts do not load PyTorch: most of the time of their start is that."""
    with numpy_framework(numpy_site):
        yield


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """For `forked_ranks`."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def forked_ranks(fork_server: ForkServer) -> Iterator[None]:
    """The ranks that supervisors start in this file are forks; others start as a user's do."""
    with fork_server.used():
        yield


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium; tests that ask for it are skipped, and said to be, where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("NOT TESTED in a browser: no Chromium here; `make test-deps` installs it")
    return found


def pytest_configure() -> None:
    """Let signals through, keep shared memory apart, and give ranks one thread.

    A shell without job control has what it runs in the background ignore interrupts, and nohup hangups.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # What two ranks get on two cores. Where it is set, ringrun does not say so, and output is that of the ranks alone.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not _IN_RANK:
        own_shared_memory()


@pytest.hookimpl(wrapper=True, trylast=True)  # inside that of pytest-timeout
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Have the time limit of a test end a second wait too: that for what it has started, which it no longer ends."""
    limit, _ = signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, limit, limit)
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the very end, in colour, what could not be tested on this machine, and what stood for a GPU."""
    ran = [report for reports in terminalreporter.stats.values() for report in reports]
    if any("tests/ranks/devices/" in getattr(report, "nodeid", "") for report in ran):
        where = f"on {len(gpus())} GPUs of this machine" if gpus() else "on fakes: there is no GPU here"
        terminalreporter.write_line(f"Tests of tensors on devices ran {where}", yellow=not gpus())
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = {report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple)}
    for reason in sorted(reason for reason in reasons if "NOT TESTED" in reason):
        terminalreporter.write_line(reason.removeprefix("Skipped: "), yellow=True, bold=True)
