"""Files on disk: closed to others whatever the umask, and those that others have planted are not believed."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
from pathlib import Path

import pytest

from harness.programs import RINGRUN, ran
from ring_notebook.config import config
from ring_notebook.errors import ClusterError
from ring_notebook.files.private_files import make_private_folder
from ring_notebook.files.whole_file import whole_file
from ring_notebook.notebook.cluster import cluster_folders
from ring_notebook.notebook.cluster.cluster import Cluster

NOBODY = 65534
TRAINING = """
import os, ring_notebook.torch as ring

@ring.elastic.run
def train(state):
    state.commit()
    (name,) = os.listdir(folder)
    print(oct(os.stat(folder).st_mode), oct(os.stat(f"{folder}/{name}").st_mode))

train(ring.elastic.TorchState(epoch=0))
"""
RESUME = """
import sys
from pathlib import Path
import ring_notebook.torch as ring
ring.init()
ring.elastic.TorchState(epoch=0).keep_on_disk(Path(sys.argv[1]))
"""


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return Path.touch, (self.mark,)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED against files of another user: needs root")


@pytest.mark.slow
def test_records_are_private_whatever_the_umask(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RING_COMMIT_DIR", str(records / "commits"))
    with Cluster(2, keep=True) as cluster:
        run = cluster.run(f"folder = {str(records / 'commits')!r}\n{TRAINING}")
        run.wait()
        said = (run.log.directory / "journal.jsonl").read_text()
        assert "0o40700 0o100600" in said, "the commit and its folder"
        exposed = [path for path in (records, *records.rglob("*")) if path.stat().st_mode & 0o077]
        cluster.stop()
    assert [path for path in exposed if path.name != "README"] == [], "that of IPython has nothing of ours"


@needs_root
def test_a_cluster_that_root_has_left_stops_no_start_of_another_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after one `sudo jupyter lab` in the same folder."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("RING_RUNS_DIR", f"{name}/runs")
        config.cache_clear()
        monkeypatch.setenv("TMPDIR", name)
        folder = cluster_folders.new_directory()
        for shared in (Path(name), folder.parent, folder.parent.parent):
            shared.chmod(0o777)
        child = os.fork()
        if child == 0:
            try:
                os.setuid(NOBODY)
                os._exit(len(list(cluster_folders.running())) + bool(cluster_folders.left_behind()))
            finally:
                os._exit(100)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    config.cache_clear()


@needs_root
def test_a_planted_cluster_is_neither_joined_nor_removed(records: Path) -> None:
    """A cluster sends pickles: to attach to it is to run its owner's code."""
    planted = cluster_folders._roots()[0] / f"{os.getpid()}-0123abcd-{socket.gethostname()}"
    make_private_folder(planted)
    cluster_folders.write(planted, {"n": 2, "why": "", "keep": True, "controller": os.getpid(), "engines": []})
    assert list(cluster_folders.running()) == [planted]
    for path in (planted, *planted.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    assert list(cluster_folders.running()) == []
    with pytest.raises(ClusterError, match="no cluster of this folder is running"):
        Cluster.attach()
    cluster_folders.new_directory()
    assert planted.is_dir()


@pytest.mark.parametrize("planted", ["another user's", "open to all", "open to a group"])
@pytest.mark.parametrize("place", ["of records", "of the runtime", "of temporary files"])
def test_a_folder_that_others_could_change_is_refused(
    place: str, planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who puts his own files in the place of a cluster's has its kernel and engines run his code."""
    if planted == "another user's" and os.geteuid() != 0:
        pytest.skip("NOT TESTED against a folder of another user: needs root")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RING_RUNS_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    config.cache_clear()
    cluster_folders.new_directory(keep=True)
    cluster_folders.new_directory()
    places = {"of records": Path(".ring"), "of temporary files": tmp_path / f"ring-notebook-{os.geteuid()}"}
    opened = places.get(place, tmp_path / "runtime" / "ring-notebook")
    if planted == "another user's":
        os.chown(opened, NOBODY, NOBODY)
    else:
        opened.chmod(0o770 if "group" in planted else 0o777)
    words = "belongs to another user" if "user" in planted else "other users may write to"
    for start in (Cluster(2).start, Cluster.attach):
        with pytest.raises(ClusterError, match=f"{words}.*(RING_RUNS_DIR|TMPDIR|XDG_RUNTIME_DIR)"):
            start()
    opened.chmod(0o1777)  # as /tmp: nobody can move what is ours
    if planted != "another user's":
        cluster_folders.new_directory()
    config.cache_clear()


@pytest.mark.slow
@needs_root
def test_a_planted_commit_is_not_loaded(tmp_path: Path) -> None:
    commit, mark = tmp_path / "commit.pt", tmp_path / "mark"
    commit.write_bytes(pickle.dumps(Evil(mark)))
    os.chown(commit, NOBODY, NOBODY)
    done = ran([*RINGRUN, "--no-prefix", "-np", "1", "python", "-c", RESUME, str(commit)])
    assert done.returncode != 0
    assert f": the commit {commit} cannot be used: " in done.stderr
    assert "it belongs to another user" in done.stderr
    assert not mark.exists()


@needs_root
def test_a_folder_of_commits_that_another_user_has_turned_into_a_link(tmp_path: Path) -> None:
    """Before a commit or while it is written: nothing is written where the link leads to."""
    folder, moved, elsewhere = (tmp_path / name for name in ("commits", "moved", "elsewhere"))
    for one in (folder, elsewhere):
        one.mkdir()

    def swap() -> None:
        folder.rename(moved)
        folder.symlink_to(elsewhere)
        os.lchown(folder, NOBODY, NOBODY)

    with whole_file(folder / "commit.pt") as file:
        file.write(b"written")
        swap()
    assert [one.name for one in moved.iterdir()] == ["commit.pt"]
    with pytest.raises(PermissionError, match=f"{folder} is a link of another user"), whole_file(folder / "commit.pt"):
        pass
    assert list(elsewhere.iterdir()) == []
    os.lchown(folder, os.geteuid(), os.getegid())  # a link of one's own, here a relative one, leads where it should
    folder.unlink()
    folder.symlink_to("elsewhere")
    with whole_file(folder / "commit.pt") as file:
        file.write(b"written")
    assert [one.name for one in elsewhere.iterdir()] == ["commit.pt"]


@pytest.mark.parametrize("name", ["x-y-HOST", "²-0-HOST", f"{'9' * 300}"[:200] + "-0-HOST", "1-\n-HOST", "1--HOST"])
def test_hostile_names_of_cluster_folders(name: str, records: Path) -> None:
    folder = cluster_folders._roots()[0] / name.replace("HOST", socket.gethostname())
    make_private_folder(folder)
    assert list(cluster_folders.running()) == []
    cluster_folders.new_directory()
