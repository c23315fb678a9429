"""Which displays of many ranks can be seen."""

from __future__ import annotations

from typing import Any

from ring_notebook.notebook.record.displays import MOST, MOST_BYTES, Displays
from ring_notebook.protocol.records import Display


def shows(rank: int, text: str, name: str = "", update: bool = False) -> Display:
    return Display("r1", rank, {"text/html": text}, {}, name, update)


def seen(displays: Displays) -> list[tuple[tuple[int, ...], Any]]:
    return [(one.ranks, one.data["text/html"]) for one in displays.visible()[0]]


def taking(*displays: Display) -> Displays:
    taken = Displays()
    for display in displays:
        taken.add(display, 0)
    return taken


def test_equal_ones_of_several_ranks_become_one_in_the_order_of_each_rank() -> None:
    taken = taking(shows(1, "b"), shows(2, "a"), shows(0, "a"), shows(1, "a"), shows(0, "c"))
    assert seen(taken) == [((0, 1, 2), "a"), ((1,), "b"), ((0,), "c")]


def test_what_one_rank_repeats_is_kept() -> None:
    assert seen(taking(shows(0, "a"), shows(0, "a"), shows(1, "a"))) == [((0, 1), "a"), ((0,), "a")]


def test_an_update_takes_the_place_of_what_the_same_rank_showed() -> None:
    taken = taking(shows(0, "a", "x"), shows(1, "a", "x"), shows(0, "after"))
    place = taken.visible()[0][0].place
    taken.add(shows(0, "b", "x", update=True), 0)
    assert seen(taken) == [((0,), "b"), ((1,), "a"), ((0,), "after")]
    assert taken.visible()[0][0].place == place
    taken.add(shows(1, "b", "x", update=True), 0)
    assert seen(taken) == [((0, 1), "b"), ((0,), "after")]
    taken.add(shows(1, "nothing", "unknown", update=True), 0)
    assert len(seen(taken)) == 2


def test_what_a_rank_takes_back_is_gone_and_its_place_is_taken_again() -> None:
    taken = taking(shows(0, "frame 1"), shows(1, "stays"))
    before = taken.visible()[0][0].place
    taken.clear(0)
    assert seen(taken) == [((1,), "stays")]
    taken.add(shows(0, "frame 2"), 0)
    assert taken.visible()[0][0].place == before


def test_the_newest_are_kept_up_to_a_number_of_bytes() -> None:
    large = "x" * (MOST_BYTES // 3)
    shown, given_way = taking(*(shows(0, f"{index}{large}") for index in range(10))).visible()
    assert [one.data["text/html"][0] for one in shown] == ["8", "9"]
    assert given_way == 8
    assert len(taking(shows(0, "a"), shows(0, 10 * large)).visible()[0]) == 1


def test_of_every_rank_the_newest_are_kept_in_any_order() -> None:
    count = 10 * MOST
    taken = taking(*(shows(rank, f"{index} of {rank}") for rank in range(4) for index in range(count)))
    assert seen(taken) == [((rank,), f"{index} of {rank}") for index in range(count - 5, count) for rank in range(4)]
    assert taken.visible()[1] == 4 * count - MOST
    assert len(taken._items) <= 4 * MOST


def test_equal_ones_count_once() -> None:
    taken = taking(*(shows(rank, str(index)) for rank in range(2) for index in range(30)))
    assert seen(taken) == [((0, 1), str(index)) for index in range(10, 30)]
    assert taken.visible()[1] == 20
