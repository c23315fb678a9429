"""What a server of the rendezvous answers, as a table: without sockets, whatever its ranks ask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from ring_notebook.rank.rendezvous_server import Gathering


def asks(value: Any, step: int = 0, formation: int = 0, **more: Any) -> dict[str, Any]:
    return {"value": value, "step": step, "formation": formation, **more}


def values(replies: dict[int, dict[str, Any]]) -> dict[int, Any]:
    """The values, or else the error, that each rank is sent."""
    return {rank: reply.get("values", reply.get("error")) for rank, reply in replies.items()}


def each(ranks: Iterable[int], value: Any) -> dict[int, Any]:
    return dict.fromkeys(ranks, value)


@pytest.mark.parametrize("named", [True, False])
def test_thousands_of_ranks_gather(named: bool) -> None:
    """Each request costs as much as there are ranks, and not the square of that."""
    size = 3000
    gathering, members = Gathering(size), list(range(size)) if named else None
    replies = [gathering.take(rank, asks(rank, members=members)) for rank in range(size)]
    assert replies[:-1] == [{}] * (size - 1)
    assert values(replies[-1]) == each(range(size), list(range(size)))


@pytest.mark.parametrize("before", [True, False])
def test_a_rank_that_has_exited_gives_nothing(before: bool) -> None:
    gathering = Gathering(3)
    why = "rank 1 exited (exit code 3) before all ranks had called init()"
    if before:
        assert gathering.exited(1, "exit code 3") == {}
        assert values(gathering.take(0, asks(1))) == {0: why}
    else:
        assert gathering.take(0, asks(1)) == {}
        assert values(gathering.exited(1, "exit code 3")) == {0: why}
    assert values(gathering.take(2, asks(1))) == {2: why}
    assert gathering.error == why


def test_a_rank_that_exits_once_all_have_formed() -> None:
    gathering = Gathering(2)
    gathering.take(0, asks(0, last=True))
    assert values(gathering.take(1, asks(1, last=True))) == {0: [0, 1], 1: [0, 1]}
    assert gathering.has_formed
    assert gathering.exited(1, "exit code 0") == {}
    assert gathering.error == ""


def test_those_that_live_form_again() -> None:
    """First without the dead one, and then with the process that takes its place."""
    gathering = Gathering(3)
    for rank in range(3):
        gathering.take(rank, asks(rank, last=True))
    key = gathering._key
    gathering.exited(1, "SIGKILL")
    assert gathering.take(2, asks("c", formation=1, members=[0, 2])) == {}
    replies = gathering.take(0, asks("a", formation=1, members=[0, 2], last=False))
    assert values(replies) == each((0, 2), ["a", None, "c"])
    assert replies[0]["key"] != key, "who has left knows no secret of those that stay"
    gathering.started_again(1)
    for rank in range(2):
        assert gathering.take(rank, asks(rank, formation=2)) == {}
    assert values(gathering.take(2, asks(2, formation=2))) == each(range(3), [0, 1, 2])


def test_a_newer_formation_ends_an_older_one() -> None:
    gathering = Gathering(2)
    assert gathering.take(0, asks(0)) == {}
    replies = gathering.take(1, asks(1, formation=3))
    assert replies == {0: {"error": "the ranks begin formation 3", "formation": 0, "step": 0}}
    assert values(gathering.take(0, asks(0))) == {0: "formation 0 is over; the ranks have formed without this one"}
    assert values(gathering.take(0, asks(0, formation=3))) == each(range(2), [0, 1])


def test_a_rank_that_was_interrupted_and_begins_again() -> None:
    gathering = Gathering(3)
    for rank in range(3):
        gathering.take(rank, asks(rank))
    assert gathering.take(1, asks(1, step=1)) == {}
    replies = gathering.take(0, asks(0))
    assert values(replies) == each((0, 1), "rank 0 has begun again while others waited for it")
    assert [replies[rank]["step"] for rank in (0, 1)] == [0, 1], "each hears of its own request"
    answers = [gathering.take(rank, asks(rank)) for rank in range(3)]
    assert values(answers[2]) == each(range(3), [0, 1, 2])


@pytest.mark.parametrize(
    "request_",
    [
        None,
        [],
        asks(1, step="0"),
        asks(1, formation=None),
        asks(1, members=[1]),
        asks(1, members=[0, 0]),
        asks(1, members=[0, 2]),
        asks(1, members=["0"]),
        asks(1, members=7),
    ],
    ids=str,
)
def test_what_is_no_request(request_: object) -> None:
    with pytest.raises(ValueError, match="rank 0: expected "):
        Gathering(2).take(0, request_)


def calls(*ranks: int, generation: int = 0) -> dict[str, Any]:
    return {"ranks": list(ranks), "generation": generation}


def formed(size: int) -> Gathering:
    """One whose ranks have formed."""
    gathering = Gathering(size, elastic=True)
    for rank in range(size):
        gathering.take(rank, asks(rank, last=True))
    return gathering


def test_all_that_live_assemble() -> None:
    """They get one number, newer than what any of them has tried, and leave out who exits before the last has come."""
    gathering = formed(4)
    assert gathering.assemble(0, calls(0, 1, 2, 3, generation=3)) == {}
    assert gathering.exited(3, "SIGKILL") == {}
    assert gathering.assemble(2, calls(0, 1, 2, 3, generation=7)) == {}
    told = {"next": 8, "members": [0, 2]}
    assert gathering.exited(1, "SIGKILL") == {0: {"generation": 3, **told}, 2: {"generation": 7, **told}}
    assert gathering.left_out == {1, 3}
    assert gathering.assemble(0, calls(0, 2, generation=8)) == {}
    told = {"generation": 8, "next": 9, "members": [0, 2]}
    assert gathering.assemble(2, calls(0, 2, generation=8)) == {0: told, 2: told}


def test_a_rank_that_has_not_seen_the_last_epoch_open() -> None:
    """It still counts on a rank that the others have gone on without before."""
    gathering = formed(4)
    gathering.exited(3, "SIGKILL")
    for rank in range(3):
        gathering.assemble(rank, calls(0, 1, 2, 3))
    gathering.exited(2, "SIGKILL")
    assert gathering.assemble(0, calls(0, 1, 2, generation=1)) == {}, "it was in that generation"
    told = {"generation": 1, "next": 2, "members": [0, 1]}
    assert gathering.assemble(1, calls(0, 1, 2, 3, generation=1)) == {0: told, 1: told}, "it was not"


def test_a_rank_that_was_interrupted_while_it_assembles_asks_again() -> None:
    """Before the others have its answer it counts once; after that it gets the answer that they have."""
    gathering = formed(2)
    for _ in range(2):
        assert gathering.assemble(0, calls(0, 1)) == {}
    told = {"generation": 0, "next": 1, "members": [0, 1]}
    assert gathering.assemble(1, calls(0, 1)) == {0: told, 1: told}
    assert gathering.assemble(0, calls(0, 1)) == {0: told}
    assert gathering.assemble(0, calls(0, 1, generation=1)) == {}


def test_parts_of_a_job_assemble_beside_each_other() -> None:
    gathering = formed(4)
    assert gathering.assemble(0, calls(0, 2)) == {}
    assert gathering.assemble(1, calls(1, 3)) == {}
    assert gathering.assemble(2, calls(0, 2)).keys() == {0, 2}
    assert gathering.give_up(1) == {1: {"generation": 0, "missing": [3]}}
    assert gathering.give_up(1) == {}
    assert gathering.assemble(3, calls(1, 3)) == {}, "rank 1 waits no more"


def form(gathering: Gathering, formation: int, members: list[int]) -> None:
    """These ranks form, in one step."""
    more = {"formation": formation, "members": members, "last": True}
    replies = [gathering.take(rank, asks(rank, **more)) for rank in members]
    assert replies[-1].keys() == set(members)
    assert "error" not in replies[-1][members[0]]


JOINS = calls()
UPDATE = {"updated": True}


def test_processes_join_those_that_train_when_these_assemble() -> None:
    """One in place of a dead rank and one more: the others are told, form with them, and come first."""
    gathering = formed(3)
    gathering.exited(0, "SIGKILL")
    gathering.resize(4)
    for rank in (0, 3):
        gathering.started_again(rank)
        assert gathering.assemble(rank, JOINS) == {1: UPDATE, 2: UPDATE}
    assert gathering.assemble(1, calls(0, 1, 2, generation=5)) == {}
    told = {"next": 6, "members": [1, 2, 0, 3], "forms": [1, 4]}
    assert gathering.assemble(2, calls(0, 1, 2, generation=5)) == {
        rank: {"generation": 5 if rank in (1, 2) else 0, **told} for rank in range(4)
    }
    form(gathering, 1, [1, 2, 0, 3])
    assert gathering.joined == {0, 3}
    assert gathering.left_out == set()
    assert gathering.assemble(3, calls(0, 1, 2, 3)) == {3: {"generation": 0, **told}}, "its init() after it has formed"
    for rank in range(3):
        assert gathering.assemble(rank, calls(0, 1, 2, 3, generation=6)) == {}
    told = {"generation": 6, "next": 7, "members": [1, 2, 0, 3]}
    assert gathering.assemble(3, calls(0, 1, 2, 3, generation=6)) == dict.fromkeys(range(4), told), "nobody forms again"


def test_who_dies_before_all_have_formed_with_those_that_join() -> None:
    """The others hear of it, assemble again, and take in another one that joins, in a newer formation."""
    gathering = formed(2)
    gathering.resize(4)
    for rank in (2, 3):
        gathering.started_again(rank)
        gathering.assemble(rank, JOINS)
    gathering.assemble(0, calls(0, 1))
    assert gathering.assemble(1, calls(0, 1))[3]["forms"] == [1, 4]
    members = {"formation": 1, "members": [0, 1, 2, 3]}
    assert gathering.take(0, asks(0, **members)) == {}
    assert gathering.exited(2, "SIGKILL")[0]["error"].startswith("rank 2 exited (SIGKILL)")
    assert gathering.error == "", "the job is not at its end"
    assert "error" in gathering.take(1, asks(0, **members))[1]
    assert gathering.assemble(0, calls(0, 1, 2, 3, generation=1)) == {}
    assert gathering.assemble(1, calls(0, 1, generation=1)) == {}, "rank 3 was to be in that generation"
    answers = gathering.assemble(3, calls(generation=1))
    assert {rank: (answer["next"], answer["members"], answer["forms"]) for rank, answer in answers.items()} == (
        each((0, 1, 3), (2, [0, 1, 3], [2, 4]))
    )
    form(gathering, 2, [0, 1, 3])
    assert gathering.joined == {3}


def test_too_few_wait_for_others() -> None:
    gathering = formed(2)
    gathering.least = 2
    gathering.exited(0, "SIGKILL")
    assert gathering.assemble(1, calls(0, 1)) == {}
    gathering.started_again(0)
    answers = gathering.assemble(0, JOINS)
    assert [answers[rank]["members"] for rank in (0, 1)] == [[1, 0]] * 2


def test_ranks_that_are_to_leave() -> None:
    """They get no answer when the others do; where too few would stay, they stay until others have come."""
    gathering = formed(3)
    gathering.least = 2
    assert gathering.dismiss({1, 2}) == dict.fromkeys(range(3), UPDATE)
    assert gathering.dismiss({1, 2}) == {}
    for rank in (0, 1):
        assert gathering.assemble(rank, calls(0, 1, 2)) == {}
    assert gathering.assemble(2, calls(0, 1, 2))[0]["members"] == [0, 1, 2]
    assert gathering.dismiss({1}) == {}, "they know that something changes"
    for rank in (0, 1):
        assert gathering.assemble(rank, calls(0, 1, 2, generation=1)) == {}
    told = {"generation": 1, "next": 2, "members": [0, 2]}
    assert gathering.assemble(2, calls(0, 1, 2, generation=1)) == {0: told, 2: told}
    assert gathering.dismissed == {1}


def test_a_part_of_a_job_takes_nobody_in() -> None:
    gathering = formed(3)
    gathering.resize(4)
    gathering.started_again(3)
    gathering.assemble(3, JOINS)
    assert gathering.assemble(0, calls(0, 1)) == {}
    assert gathering.assemble(1, calls(0, 1)).keys() == {0, 1}


@pytest.mark.parametrize(
    "request_",
    [
        None,
        calls(),
        calls(1),
        calls(0, 2),
        {"ranks": [0]},
        {"ranks": 0, "generation": 0},
        {"ranks": [0], "generation": "1"},
        {"ranks": [0, [1]], "generation": 0},
    ],
    ids=str,
)
def test_what_is_no_call(request_: object) -> None:
    with pytest.raises(ValueError, match="rank 0: expected "):
        Gathering(2).assemble(0, request_)
