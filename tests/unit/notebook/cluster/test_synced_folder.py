"""What of a folder is code to sync: not what is hidden, large, an environment of packages, or elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ring_notebook.engine import synced_modules
from ring_notebook.errors import ClusterError
from ring_notebook.notebook.cluster import synced_folder
from ring_notebook.notebook.cluster.synced_folder import MOST_BYTES, SyncedFolder


def files_of(folder: Path) -> set[str]:
    stamps, _ = SyncedFolder(folder)._scan()
    return set(stamps)


def test_code_of_the_folder_and_of_nothing_else(tmp_path: Path) -> None:
    folder, outside = tmp_path / "work", tmp_path / "outside"
    for name in ["a.py", "pkg/__init__.py", "pkg/deep/b.py", "settings.yaml", "pkg/page.j2"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    for name in [".hidden.py", ".git/c.py", "__pycache__/a.py", "env/lib/x.py", "data.bin", "notebook.ipynb"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "env" / "pyvenv.cfg").touch()
    outside.mkdir()
    (outside / "secret.py").touch()
    (folder / "link.py").symlink_to(outside / "secret.py")
    (folder / "linked").symlink_to(outside)
    (folder / "same.py").symlink_to(folder / "a.py")
    assert files_of(folder) == {"a.py", "pkg/__init__.py", "pkg/deep/b.py", "settings.yaml", "pkg/page.j2", "same.py"}


def test_what_is_too_large_is_named(tmp_path: Path) -> None:
    (tmp_path / "big.json").write_bytes(b" " * (MOST_BYTES + 1))
    stamps, left_out = SyncedFolder(tmp_path)._scan()
    assert (stamps, left_out) == ({}, ("big.json (above 1 MiB)",))


@pytest.mark.parametrize(("limit", "name"), [("MOST_FILES", "files"), ("_MOST_FOLDERS", "folders")])
def test_a_folder_that_holds_too_much_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, name: str
) -> None:
    monkeypatch.setattr(synced_folder, limit, 2)
    for count in range(4):
        (tmp_path / f"d{count}").mkdir()
        (tmp_path / f"d{count}" / "m.py").touch()
    with pytest.raises(ClusterError, match=rf"holds more than 2 {name}.*in a folder of their own"):
        SyncedFolder(tmp_path)._scan()


@pytest.mark.parametrize("path", ["../x.py", "/etc/x.py", "a/../../x.py"])
def test_a_rank_writes_nothing_outside_of_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    def own_copy() -> Any:
        return tmp_path / "copy"

    (tmp_path / "copy").mkdir()
    monkeypatch.setattr(synced_modules, "_own_copy", own_copy)
    monkeypatch.setattr(synced_modules.setup, "rank", lambda: 1)
    with pytest.raises(ValueError, match=r"rank 1: .*is outside of the synced folder"):
        synced_modules.take({path: b""})
    synced_modules.take({"pkg/m.py": b"x = 1"})
    assert (tmp_path / "copy" / "pkg" / "m.py").read_bytes() == b"x = 1"
