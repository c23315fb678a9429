"""Host lists and host files, as tables."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from ring_notebook.launch.launchers.hosts import (
    Host,
    expand_names,
    is_local,
    named_hosts,
    parse_hostfile,
    parse_hosts,
    place,
    slots_by_name,
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2,b:4", [Host("a", 2), Host("b", 4)]),
        ("a", [Host("a", 1)]),
        (" a:2 , b ,", [Host("a", 2), Host("b", 1)]),
        ("10.0.0.1:8", [Host("10.0.0.1", 8)]),
        ("[fd00::1]:8,fd00::2,[fd00::3]", [Host("fd00::1", 8), Host("fd00::2", 1), Host("fd00::3", 1)]),
        ("n[01-02,7]:8", [Host("n01", 8), Host("n02", 8), Host("n7", 8)]),
        (" a[1-2] ,[fd00::1]:2", [Host("a1", 1), Host("a2", 1), Host("fd00::1", 2)]),
        ("", []),
    ],
)
def test_host_list(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts
    assert parse_hosts(",".join(map(str, hosts))) == hosts


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("rack[1-2]n[09-10]", ["rack1n09", "rack1n10", "rack2n09", "rack2n10"]),
        ("c[1-2].site", ["c1.site", "c2.site"]),
    ],
)
def test_ranges_of_names(short: str, names: list[str]) -> None:
    assert expand_names(short) == names
    assert parse_hosts(short, 4) == [Host(name, 4) for name in names]


@pytest.mark.parametrize("short", ["n[a-b]", "n[3-1]", "n[]", "n[1-3", "n1]", "n[1-2]m[", "n[1-9999999]"])
def test_a_range_that_cannot_be_read_is_quoted(short: str) -> None:
    for read in (parse_hosts, expand_names):
        with pytest.raises(ValueError, match=r"cannot read host '.*n.*'; expected numbers in brackets"):
            read(f"ok,{short}")


def test_names_have_no_case() -> None:
    here = socket.gethostname()
    hosts = parse_hosts(f"{here.upper()}:2,Far:1,localhost:1,FAR:2")
    assert slots_by_name(hosts) == {here: 3, "Far": 3}
    assert is_local(here.upper())
    assert place(5, hosts) == {here: [0, 1, 3], "Far": [2, 4]}


@pytest.mark.parametrize("text", ["a:", "a:two", ":2", "a:0", "a:-1", "a:2:3", "[a]:2", "[fd00::1"])
def test_a_host_that_cannot_be_read_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"cannot read host '{text}'; expected NAME or NAME:SLOTS")):
        parse_hosts(f"ok:1,{text}")


def test_host_file() -> None:
    text = "# the cluster\na slots=2\n\nb:4  # fast\nc max_slots=9 slots=3\nd\nfd00::1 slots=2\n"
    text += "n[1,3]:3\nm[01-02] slots=5\n"
    assert parse_hostfile(text) == [
        *(Host("a", 2), Host("b", 4), Host("c", 3), Host("d", 1), Host("fd00::1", 2)),
        *(Host("n1", 3), Host("n3", 3), Host("m01", 5), Host("m02", 5)),
    ]


def test_a_wrong_line_of_a_host_file_is_numbered() -> None:
    with pytest.raises(ValueError, match="host file, line 2: cannot read host 'b:x'"):
        parse_hostfile("a\nb slots=x\n")


def test_a_list_or_a_file_without_a_host_is_not_this_host(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# none yet\n\n")
    assert named_hosts(None, None) == []
    with pytest.raises(ValueError, match=r"the host file .*hosts' names no host; expected HOST or HOST:SLOTS for each"):
        named_hosts(None, str(tmp_path / "hosts"))
    for hosts in (", ", ""):
        with pytest.raises(ValueError, match=f"the list of hosts '{hosts}' names no host"):
            named_hosts(hosts, None)
    with pytest.raises(ValueError, match="the host file '' names no host"):
        named_hosts(None, "")


def test_a_host_file_of_an_editor_that_marks_its_encoding(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfa slots=2\r\nb\r\n")
    assert named_hosts(None, str(tmp_path / "hosts")) == [Host("a", 2), Host("b", 1)]
