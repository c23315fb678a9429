"""Host lists and host files, as tables."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from ring_notebook.launch.launchers.hosts import (
    Host,
    is_local,
    named_hosts,
    parse_hostfile,
    parse_hosts,
    slots_by_name,
)
from ring_notebook.launch.supervise import place


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2,b:4", [Host("a", 2), Host("b", 4)]),
        ("a", [Host("a", 1)]),
        (" a:2 , b ,", [Host("a", 2), Host("b", 1)]),
        ("10.0.0.1:8", [Host("10.0.0.1", 8)]),
        ("[fd00::1]:8,fd00::2,[fd00::3]", [Host("fd00::1", 8), Host("fd00::2", 1), Host("fd00::3", 1)]),
        ("", []),
    ],
)
def test_host_list(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts
    assert parse_hosts(",".join(map(str, hosts))) == hosts


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
    assert parse_hostfile(text) == [Host("a", 2), Host("b", 4), Host("c", 3), Host("d", 1), Host("fd00::1", 2)]


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
