"""On which hosts engines start, after requests of a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ring_notebook.launch.supervisor.engine_supervisor import _REQUEST, EngineSupervisor
from ring_notebook.launch.supervisor.supervisor import Hosts


class FakeRanks:
    """The ranks of a host, none of which runs."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)

    def assign(self, ranks: Sequence[int], _size: int) -> None:
        self.ranks = list(ranks)


class Requests(EngineSupervisor):
    """Carries out requests without processes: ranks 0 and 1 are on host a, 2 and 3 on b."""

    def __init__(self) -> None:
        def make(_name: str, ranks: list[int], _size: int, _others: Iterable[str]) -> Any:
            return FakeRanks(ranks)

        by_name: Any = {"a": FakeRanks([0, 1]), "b": FakeRanks([2, 3])}
        self._hosts = Hosts(make, by_name, {"a": 2, "b": 2})
        connections: Any = SimpleNamespace(size=4)
        connections.resize = lambda size: setattr(connections, "size", size)
        self._connections = connections
        self._running, self._wanted, self._dropped = {0, 1, 2, 3}, {}, set()

    def _note(self, _kind: str, value: Any = 0.0) -> None:
        self._running.discard(value)

    def _start_again(self, rank: int, name: str, _formation: int = 1) -> None:
        self._hosts.assign(rank, name, self._connections.size)
        self._running.add(rank)

    def ask(self, *lines: str) -> dict[str, list[int]]:
        for line in lines:
            match = _REQUEST.fullmatch(line.encode())
            assert match, line
            self._carry_out(match[1].decode(), int(match[2]), (match[3] or b"").decode())
        return {name: host.ranks for name, host in self._hosts.by_name.items() if host.ranks}


@pytest.mark.parametrize(
    ("slots", "ranks"),
    [
        ([], {"a": [0, 1], "b": [2, 3]}),
        (["slots 2 a", "slots 2 c", "slots 0 b"], {"a": [0, 1], "c": [2, 3]}),
        (["slots 3 a", "slots 1 c", "slots 0 b"], {"a": [0, 1, 2], "c": [3]}),
        (["slots 4 a"], {"a": [0, 1, 2, 3]}),
    ],
)
def test_ranks_that_were_ended_start_where_there_are_slots_now(slots: list[str], ranks: dict[str, list[int]]) -> None:
    """And not where ranks of these numbers have been."""
    assert Requests().ask("size 2", *slots, "size 4", "start 2 5", "start 3 5") == ranks


def test_a_rank_that_died_starts_on_its_host_again() -> None:
    supervisor = Requests()
    supervisor._running.remove(2)
    assert supervisor.ask("slots 4 a", "slots 2 b", "start 2 5") == {"a": [0, 1], "b": [2, 3]}


def test_a_host_that_is_named_no_more_gets_no_rank() -> None:
    """Its ranks stay; its slots are free when they end."""
    assert Requests().ask("slots 2 a", "slots 3 c", "slots 0 b", "size 5", "start 4 5") == {
        "a": [0, 1],
        "b": [2, 3],
        "c": [4],
    }
