"""The pytest plugin that runs a tenth of the chosen tests: ``-m slow --tenth 3``.

``--tenth commit`` takes the tenth by the date of the last commit, and all tests of files that expect words of an older
version. ``--minutes 20`` begins no test after 20 minutes.

Each test always belongs to the same tenth, so ten runs with different numbers run all of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

import pytest

from harness.gone_words import expected_words, git, gone_words

__all__ = ["SECONDS", "tenth_of", "tenth_of_date"]

SECONDS = 3200
"""Seconds from one tenth to the next.

A day has 27 of these, and a week 189. Neither number shares a factor with 10, so ten landings at the same hour, one a
day or one a week, run all ten tenths.
"""
TARGETS = ("places", "slurm", "workshop")
"""Folders in no tenth: their own targets run them, because they need more time, or programs that CI lacks."""
NO_TIME = "NOT RUN: no time was left"

# Monotonic time after which no test begins. Not an environment variable: pytests that tests start have no limit.
_UNTIL = pytest.StashKey[float]()
_TENTH = pytest.StashKey[int]()
_OTHERS = pytest.StashKey[list[str]]()


def tenth_of_date(seconds: int) -> int:
    """The tenth, 0 to 9, that a commit of this date runs; in seconds since 1970."""
    return seconds // SECONDS % 10


def tenth_of(nodeid: str) -> int:
    """The tenth to which a test belongs, 0 to 9."""
    return crc32(nodeid.encode()) % 10


def by_folder(nodeids: Iterable[str]) -> str:
    """How many tests there are in each folder below tests."""
    counts = Counter(Path(nodeid.partition("::")[0]).parts[1] for nodeid in nodeids)
    return ", ".join(f"{folder} {count}" for folder, count in sorted(counts.items())) or "none"


def chosen(option: str, root: Path, files: Iterable[Path]) -> tuple[int, set[Path]]:
    """The tenth that ``--tenth`` asks for, and the files whose tests all run."""
    if option != "commit":
        return int(option), set()
    gone = gone_words(root)
    late = {file for file in files if not gone.isdisjoint(expected_words(file.read_text()))}
    return tenth_of_date(int(git(root, "log", "-1", "--format=%ct"))), late


def pytest_addoption(parser: pytest.Parser) -> None:
    tenths = [*map(str, range(10)), "commit"]
    parser.addoption("--tenth", choices=tenths, help="of the chosen tests run a tenth; commit: by the date of HEAD")
    parser.addoption("--minutes", type=float, help="begin no test after this time")


def pytest_configure(config: pytest.Config) -> None:
    minutes = config.getoption("--minutes")
    config.stash[_UNTIL] = float("inf") if minutes is None else time.monotonic() + 60 * minutes


# After the choice by marks; before `rank_tests`, which is loaded later, makes launches of the remaining tests.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    option = config.getoption("--tenth")
    if option is None:
        return
    folders = {Path(config.rootpath, "tests", name) for name in TARGETS}
    ours = [item for item in items if not folders.intersection(item.path.parents)]
    tenth, whole = chosen(option, config.rootpath, {item.path for item in ours})
    config.stash[_TENTH] = tenth
    mine = [item for item in ours if tenth_of(item.nodeid) == tenth or item.path in whole]
    config.stash[_OTHERS] = [item.nodeid for item in ours if item not in mine]
    config.hook.pytest_deselected(items=[item for item in items if item not in mine])
    items[:] = mine


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > item.config.stash[_UNTIL]:
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what ran, and what did not."""
    others = config.stash.get(_OTHERS, None)
    if others is None:
        return
    found = {kind: terminalreporter.stats.get(kind, []) for kind in ("passed", "failed", "skipped")}
    late = [one.nodeid for one in found["skipped"] if isinstance(one.longrepr, tuple) and NO_TIME in one.longrepr[2]]
    ran = [one.nodeid for kind in found.values() for one in kind if one.nodeid not in late and "::" in one.nodeid]
    terminalreporter.section(f"tenth {config.stash[_TENTH]}")
    terminalreporter.write_line(f"ran: {by_folder(ran)}")
    terminalreporter.write_line(f"no time was left: {by_folder(late)}")
    terminalreporter.write_line(f"in the other nine: {by_folder(others)}")
