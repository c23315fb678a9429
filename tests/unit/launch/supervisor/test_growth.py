"""What an elastic job starts and ends next, as tables: slots of hosts, ranks that run, and hosts that have failed."""

from __future__ import annotations

import pytest

from ring_notebook.launch.supervisor.growth import Elastic, Growth

TWO = {"a": 2, "b": 2}


@pytest.mark.parametrize(
    ("slots", "running", "max_np", "due"),
    [
        (TWO, "aabb", 4, {}),
        (TWO, "aabb", 0, {}),
        (TWO, "aab-", 4, {3: "b"}),
        (TWO, "-ab-", 4, {0: "a", 3: "b"}),
        (TWO, "-ab-", 3, {0: "a"}),
        (TWO, "a", 8, {1: "a", 2: "b", 3: "b"}),
        (TWO, "a", 2, {1: "a"}),
        (TWO, "a", 0, {1: "a", 2: "b", 3: "b"}),
        ({"a": 2, "b": 1, "c": 3}, "aab", 5, {3: "c", 4: "c"}),
        ({"c": 2}, "aa", 4, {2: "c", 3: "c"}),
        ({"c": 2}, "aa", 2, {}),
        ({"a": 1}, "aa", 0, {}),
    ],
)
def test_ranks_that_are_due(slots: dict[str, int], running: str, max_np: int, due: dict[int, str]) -> None:
    """``running`` has the host of each rank, ``-`` for one that does not run."""
    places = {rank: host for rank, host in enumerate(running) if host != "-"}
    assert Growth(Elastic(1, max_np, "script"), slots).due(places, 0.0) == due


@pytest.mark.parametrize(
    ("slots", "running", "surplus"),
    [
        (TWO, "aabb", set()),
        ({"a": 2}, "aabb", {2, 3}),
        ({"a": 1, "b": 2}, "abab", {2}),
        ({"c": 4}, "ab", {0, 1}),
        ({"a": 4, "c": 4}, "aa", set()),
    ],
)
def test_ranks_without_a_slot(slots: dict[str, int], running: str, surplus: set[int]) -> None:
    assert Growth(Elastic(1, 0, "script"), slots).surplus(dict(enumerate(running))) == surplus


def test_a_host_rests_after_a_failure() -> None:
    """Twice as long each time, up to a limit; once where several ranks fail together; as at first after a while."""
    growth = Growth(Elastic(1, 4, cooldown=(2.0, 10.0)), TWO)
    running = {0: "a", 1: "a"}
    assert growth.fail("b", 100.0) == 2.0
    assert growth.fail("b", 100.5) == 1.5, "another rank of the same failure"
    assert growth.due(running, 101.9) == {}
    assert growth.due(running, 102.0) == {2: "b", 3: "b"}
    assert growth.fail("b", 103.0) == 4.0
    assert growth.due({1: "a"}, 106.9) == {0: "a"}, "the other host does not"
    assert growth.fail("b", 107.0) == 8.0
    assert growth.fail("b", 116.0) == 10.0
    assert growth.fail("b", 130.0) == 10.0
    assert growth.fail("b", 160.0) == 2.0


@pytest.mark.parametrize(
    "rules", [Elastic(), Elastic(2), Elastic(2, 8), Elastic(1, 0, "./hosts.sh -x", 2, (1.5, 30.0), 9.0)], ids=str
)
def test_rules_on_a_command_line(rules: Elastic) -> None:
    assert Elastic.parse(str(rules)) == rules
