"""The pytest plugin that runs tests/ranks inside ranks: P processes for each P in the mark `sizes` of a test.

All tests of a size share a launch, because starting ranks and importing torch takes seconds. Ranks of launches of three
and more are forks of one process that has imported torch. One or two ranks have interpreters of their own, with
different seeds of `hash`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.forked_ranks import MODULES, ForkServer
from harness.launch import TEST_LIMIT, Launch

__all__ = ["RankItem"]


class RankFailedError(Exception):
    """A test failed on a rank; it has the output of the ranks."""


_APART = "devices"
"""The folder whose tests have launches of their own: they change torch for all tests of a process."""

STARTS = 180.0
"""Seconds that ranks may take to start on a busy machine, in addition to the limit of a test."""

_MODULES = (
    *MODULES,
    *("pytest", "torch.testing", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    "torch.distributed.pipelining",
)
"""What most of these files import."""


class RankItem(pytest.Item):
    """Represents a test that runs inside ranks, and waits for its outcome."""

    def __init__(self, *, original: pytest.Function, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size = int(str(original.callspec.params["size"]))
        self.limit = _limit(original)
        self.add_marker(pytest.mark.timeout(self.limit + STARTS))
        self.launch: Launch | None = None
        self.following: Launch | None = None
        self._reportinfo = original.reportinfo()

    def runtest(self) -> None:
        assert self.launch is not None
        if self.following is not None and self.launch.nearly_done:
            self.following.begin()
        result = self.launch.result(self.nodeid, self.limit)
        if result.outcome == "failed":
            raise RankFailedError(result.text)
        if result.outcome == "skipped":
            pytest.skip(result.text)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, RankFailedError):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> Any:
        return self._reportinfo


def _limit(item: pytest.Item) -> float:
    """Seconds that a test may take: ``@pytest.mark.timeout(S)``, or the usual limit."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else TEST_LIMIT


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Replace tests with ranks by RankItems; those of one launch follow each other."""
    ranks = Path(config.rootpath, "tests", "ranks")
    by_launch: dict[tuple[bool, int], list[RankItem]] = {}
    others: list[pytest.Item] = []
    for item in items:
        if isinstance(item, pytest.Function) and ranks in item.path.parents:
            assert item.parent is not None
            stand_in = RankItem.from_parent(item.parent, name=item.name, original=item)
            by_launch.setdefault((ranks / _APART in item.path.parents, stand_in.size), []).append(stand_in)
        else:
            others.append(item)
    before: list[RankItem] = []
    server = config.stash[_SERVER] = ForkServer(_MODULES)
    for (apart, size), group in sorted(by_launch.items()):
        forked = size > 2 or apart
        launch = Launch(config.rootpath, [item.nodeid for item in group], size, server if forked else None)
        for item in before:
            item.following = launch
        for item in group:
            item.launch = launch
        before = group
    config.stash[_LAUNCHES] = [group[0].launch for group in by_launch.values()]
    items[:] = others + [item for group in by_launch.values() for item in group]


_SERVER = pytest.StashKey[ForkServer]()
_LAUNCHES = pytest.StashKey[list[Any]]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the ranks when a session was interrupted or stopped at a failure."""
    for launch in session.config.stash.get(_LAUNCHES, []):
        launch.close()
    if (server := session.config.stash.get(_SERVER, None)) is not None:
        server.close()
