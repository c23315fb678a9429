"""Folders and files of ours are closed to others, whatever the umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ring_notebook.files.private_files import changed_by_others, is_own, make_private_folder, open_private, replace_text


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o277], autouse=True)
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o077


def test_what_others_may_do_does_not_depend_on_the_umask(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    make_private_folder(folder)
    make_private_folder(folder)
    for name, kind, content in (("text", "w", "ü"), ("bytes", "wb", b"1"), ("more", "ab", b"2")):
        with open_private(folder / name, kind) as file:
            file.write(content)
    assert {path.name: mode(path) for path in (tmp_path / "a").rglob("*")} == dict.fromkeys(
        ("b", "text", "bytes", "more"), 0
    )
    assert mode(tmp_path / "a") == 0
    assert (folder / "text").read_bytes() == b"\xc3\xbc"


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    make_private_folder(shared / "own")
    assert mode(shared) == 0o075
    assert mode(shared / "own") == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED whether files of another user are refused: needs root")
def test_what_another_user_left_is_not_own(tmp_path: Path) -> None:
    theirs, link = tmp_path / "theirs", tmp_path / "link"
    theirs.touch()
    os.chown(theirs, 65534, 65534)
    link.symlink_to(tmp_path / "ours")
    (tmp_path / "ours").touch()
    os.lchown(link, 65534, 65534)
    assert [is_own(path) for path in (theirs, link, tmp_path / "ours")] == [False, False, True]
    own_link = tmp_path / "own link"
    own_link.symlink_to(theirs)
    assert f"{own_link} belongs to another user, nobody;" in changed_by_others(own_link)
    assert f"{link} belongs to another user, nobody;" in changed_by_others(link)


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o644)])
def test_a_text_is_replaced_as_a_whole(tmp_path: Path, private: bool, mode: int) -> None:
    path = tmp_path / "text"
    path.write_text("before")
    with path.open() as reader:
        before = os.umask(0o022)
        try:
            replace_text(path, "é", private=private)
        finally:
            os.umask(before)
        assert (reader.read(), path.read_bytes()) == ("before", "é".encode())
    assert path.stat().st_mode & 0o777 == mode
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "\udc80")
    assert [one.name for one in tmp_path.iterdir()] == ["text"]
    assert path.read_text(encoding="utf-8") == "é"
