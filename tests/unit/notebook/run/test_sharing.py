"""Runs that are shared by a link or a file, and the tiles that others draw of them."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import socket
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from harness.waiting import until
from ring_notebook.errors import RingError
from ring_notebook.files.whole_file import checked, whole_file
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.run import sharing
from ring_notebook.notebook.run.classroom import Classroom
from ring_notebook.notebook.run.sharing import MOST_BYTES, SUFFIX, Sharing, Tile, read_tile, tile_of
from ring_notebook.protocol.records import Failure, MetricBatch, encode

RUN = "1-first"
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    made = RunLog(tmp_path / "runs" / RUN, RUN, HOSTILE, 2, "print(1)\n", {}, {})
    for rank in range(2):
        rows = [number for step in range(100) for number in (made.started, step, 1 / (step + 1))]
        made.put(encode([MetricBatch(RUN, rank, ("loss",), array("d", rows))]))
    yield made
    made.close()


def failure(rank: int) -> Failure:
    return Failure(RUN, rank, "ZeroDivisionError", "builtins", "division by zero", (), "Traceback")


def test_a_tile_says_what_the_run_does(log: RunLog) -> None:
    until(lambda: "loss" in log.view().names)
    tile = read_tile(tile_of(log, "ann").data())
    assert (tile.who, tile.state, tile.ranks, tile.metric) == ("ann", "running", 2, "loss")
    assert 2 < len(tile.curve) <= 60
    assert tile.curve[0] > tile.curve[-1] > 0
    assert read_tile(tile_of(None, "ann").data()).state == "idle"


def test_a_tile_names_the_rank_that_failed_first(log: RunLog) -> None:
    log.put(encode([failure(1)]))
    until(lambda: bool(log.view().failures))
    tile = tile_of(log, "ann")
    assert tile.failed == (1,)
    assert tile.text == "ZeroDivisionError: division by zero (rank 1)"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"who": "ann"}',
        b'{"who": "ann", "time": "now"}',
        b'{"who": "ann", "time": NaN}',
        b'{"who": "ann", "time": 1, "seconds": Infinity}',
        b'{"who": "ann", "time": 1, "state": "well"}',
        b'{"who": "ann", "time": 1, "failed": [[1]]}',
        b'{"who": "ann", "time": 1, "curve": ["one"]}',
        b'{"who": "ann", "time": 1, "curve": [1' + b"0" * 400 + b"]}",
        b'{"who": "ann", "time": 1, "other": 1}',
        json.dumps({"who": "ann", "time": 1, "curve": [1] * 61}).encode(),
        json.dumps({"who": "a" * MOST_BYTES, "time": 1}).encode(),
    ],
)
def test_what_is_no_tile_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"tile|expected|finite|Expecting|decode|convert|field"):
        read_tile(data)


def get(link: str, method: str = "GET") -> tuple[int, str, dict[str, str]]:
    address = urlsplit(link)
    connection = http.client.HTTPConnection(address.netloc, timeout=20)
    connection.request(method, address.path)
    answer = connection.getresponse()
    result = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return result


@pytest.fixture
def link(log: RunLog) -> Iterator[str]:
    shared = Sharing(lambda: log)
    found = re.search(r"http://\S+", shared.begin(name="ann"))
    assert found is not None
    yield found[0]
    shared.end()


def test_a_link_shows_the_report_and_the_tile(link: str) -> None:
    status, page, headers = get(link)
    nonce = re.search(r"<script nonce=(\S+)>", page)
    assert status == 200
    assert nonce is not None
    assert f"script-src 'nonce-{nonce[1]}'" in headers["Content-Security-Policy"]
    status, report, headers = get(f"{link}report")
    assert status == 200
    assert "data-tip" in report, "no chart"
    assert "<script" not in report, "the name of the run is not escaped"
    assert "script-src 'none'" in headers["Content-Security-Policy"]
    assert read_tile(get(f"{link}tile")[1].encode()).who == "ann"


def test_a_link_is_of_no_use_without_its_secret(link: str) -> None:
    base, token = link.rstrip("/").rsplit("/", 1)
    for path in [
        "",
        "tile",
        "report",
        f"{token[:-1]}/tile",
        f"{token}x/tile",
        f"{'x' * len(token)}/tile",
        f"../{token}/",
    ]:
        status, text, _ = get(f"{base}/{path}")
        assert (status, text) == (404, "There is nothing here."), path
    assert get(f"{link}../../etc/passwd")[0] == 404
    for method in ("POST", "PUT", "DELETE"):
        assert get(f"{link}tile", method)[0] == 501


@pytest.mark.slow
def test_visitors_that_say_nothing_keep_others_out_for_a_while_only(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing._Visit, "timeout", 1.0)
    address = urlsplit(link)
    with ExitStack() as silent:
        for _ in range(50):
            silent.enter_context(socket.create_connection((address.hostname, address.port)))

        def answered() -> bool:
            try:
                return get(f"{link}tile")[0] == 200
            except (OSError, http.client.HTTPException):
                return False

        until(answered)


def test_nothing_listens_after_the_end(log: RunLog) -> None:
    shared = Sharing(lambda: log)
    found = re.search(r"http://\S+", shared.begin())
    assert found is not None
    assert shared.begin("off") == "Runs are not shared any more."
    with pytest.raises(ConnectionRefusedError):
        get(found[0])
    assert shared.begin("off") == "Nothing is shared."


def test_a_file_follows_the_run_and_goes_with_the_notebook(log: RunLog, tmp_path: Path) -> None:
    room = tmp_path / "room"
    shared = Sharing(lambda: log)
    with pytest.raises(RingError, match="is no folder"):
        shared.begin(str(room))
    room.mkdir()
    before = os.umask(0o077)
    try:
        shared.begin(str(room), "ann")
    finally:
        os.umask(before)
    (file,) = room.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644
    log.put(encode([failure(0)]))

    def failed() -> bool:
        return read_tile(checked(file.read_bytes())).failed == (0,)

    until(failed)
    shared.end()
    assert list(room.iterdir()) == []


def write(path: Path, data: bytes) -> None:
    with whole_file(path) as file:
        file.write(data)


def tiles(room: Path) -> tuple[str, str]:
    classroom = Classroom([str(room)])
    classroom.close()
    shown = classroom._shown(classroom._look())
    return shown["text/html"], shown["text/plain"]


def test_tiles_of_hostile_files_are_text_or_refused(tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"who": "secret", "time": 1}))
    good = Tile("ann", time.time(), "failed", HOSTILE, HOSTILE, 2, (1,), 3.0, 0.5, 100.0, HOSTILE, (1.0, math.nan, 0.5))
    write(room / f"1{SUFFIX}", good.data())
    (room / f"2{SUFFIX}").symlink_to(secret)
    os.mkfifo(room / f"3{SUFFIX}")
    (room / f"4{SUFFIX}").mkdir()
    (room / f"5{SUFFIX}").write_bytes(b"x" * (1 << 20))
    write(room / f"<b>{SUFFIX}", b"{}")
    whole = (room / f"1{SUFFIX}").read_bytes()
    (room / f"6{SUFFIX}").write_bytes(whole[:-1])
    (room / "notes.txt").write_text("mine")
    page, text = tiles(room)
    assert "<script" not in page
    assert "onerror=alert(1)>" not in page
    assert "<b>&lt;b&gt;</b>" in page
    assert "secret" not in text
    assert text.count("unreadable") == 6
    (first, *_) = [line for line in text.splitlines() if "ann" in line]
    assert "failed" in first


def test_a_tile_bears_the_login_of_its_file(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("NOT TESTED with the file of another user: needs root")
    file = tmp_path / f"1{SUFFIX}"
    write(file, Tile("root", time.time()).data())
    os.chown(file, 65534, 65534)
    assert "root (nobody)" in tiles(tmp_path)[1]


def test_links_and_folders_are_told_apart(link: str, tmp_path: Path) -> None:
    with pytest.raises(RingError, match="no folder"):
        Classroom([str(tmp_path / "none")])
    with pytest.raises(RingError, match="begins with http"):
        Classroom(["file:///etc/passwd"])
    classroom = Classroom([link, f"{link[:-4]}/", str(tmp_path)])
    classroom.close()
    rows = classroom._shown(classroom._look())["text/plain"].splitlines()[1:]
    assert ["unreadable" in row for row in rows] == [True, False]
    assert "Not Found" in rows[0]
    assert link.split("/")[-2][:-4] not in rows[0], "an error shows the secret"
    assert "ann" in rows[1]
