"""A checkpoint that replaces one of its name, or is removed: a kill at any moment leaves whole ones only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ring_notebook.files.checkpoint_folder import REST, LocalFolder, found
from ring_notebook.files.remote_folder import RemoteFolder

_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "open")
_left: int | None = None
"""After how many further changes of the disk this process counts as killed; None: never."""


class _Killed(BaseException):
    pass


def _hook(event: str, _: Any) -> None:
    global _left
    if _left is not None and event in _CHANGES:
        if _left <= 0:
            raise _Killed
        _left -= 1


@contextmanager
def killed_after(changes: int) -> Iterator[None]:
    """Ends the block after this many changes of the disk; what follows in it, such as ``finally``, changes nothing."""
    global _left
    _left = changes
    try:
        yield
    finally:
        _left = None


@pytest.fixture(scope="module", autouse=True)
def _hooked() -> None:
    sys.addaudithook(_hook)


Place = LocalFolder | RemoteFolder


def write(place: Place, content: str, step: int = 4, best: bool = False) -> None:
    begun = place.begin(step)
    for name in ("a", "b"):
        Path(begun.removeprefix("local://"), name).write_text(content)
    place.complete(begun, step, best, content.encode())


def contents(place: Place) -> list[str]:
    """What each checkpoint of `found` holds; fails if one of them is not whole."""
    there = []
    for one in place.found():
        folder = Path(str(one.path).removeprefix("local://"))
        text = (folder / "a").read_text()
        assert (folder / "b").read_text() == text
        assert (folder / REST).read_bytes().startswith(text.encode())
        there.append(text)
    return there


def at_every_moment(make: Callable[[int], Place], act: Callable[[Place], None]) -> Iterator[Place]:
    """The place that ``make`` prepares, after an ``act`` on it was killed: each time one change of the disk later."""
    for changes in count():
        place = make(changes)
        died = True
        with suppress(_Killed), killed_after(changes):
            act(place)
            died = False
        yield place
        if not died:
            assert changes > 3, "no change of the disk was seen"
            return


@pytest.fixture(params=["folder", "URL"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Place]:
    if request.param == "folder":
        return lambda number: LocalFolder(tmp_path / str(number))
    pytest.importorskip("fsspec")
    return lambda number: RemoteFolder(f"local://{tmp_path}/{number}")


@pytest.mark.parametrize("best", [False, True])
def test_of_an_old_and_a_new_one_of_a_name_one_is_whole(make: Callable[[int], Place], best: bool) -> None:
    def made(number: int) -> Place:
        place = make(number)
        write(place, "old", best=best)
        return place

    seen = []
    for place in at_every_moment(made, lambda place: write(place, "new", best=best)):
        seen.append(contents(place)[-1])
        write(place, "third", best=best)
        assert contents(place) == ["third"]
        assert [one.best for one in place.found()] == [best]
    assert list(dict.fromkeys(seen)) == ["old", "new"]


def test_one_that_is_removed_counts_as_whole_no_more(make: Callable[[int], Place]) -> None:
    """Else a torn one would be the newest of the folder, from which a training resumes."""

    def made(number: int) -> Place:
        place = make(number)
        write(place, "first", 1)
        write(place, "second", 2)
        return place

    seen = []
    for place in at_every_moment(made, lambda place: place.remove(place.found()[0])):
        seen.append(tuple(contents(place)))
        write(place, "third", 3)
        assert contents(place)[-2:] == ["second", "third"]
    assert list(dict.fromkeys(seen)) == [("first", "second"), ("second",)]


def test_the_best_becomes_an_ordinary_one_where_one_of_its_step_stands(tmp_path: Path) -> None:
    place = LocalFolder(tmp_path)
    write(place, "old")
    write(place, "best", best=True)
    place.unmark_best(next(one for one in place.found() if one.best))
    assert contents(place) == ["best"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
    assert [one.step for one in found(tmp_path)] == [4]
