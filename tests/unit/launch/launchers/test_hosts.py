"""Host lists and host files, as tables."""

from __future__ import annotations

import pytest

from ring_notebook.launch.launchers.hosts import Host, parse_hostfile, parse_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2,b:4", [Host("a", 2), Host("b", 4)]),
        ("a", [Host("a", 1)]),
        (" a:2 , b ,", [Host("a", 2), Host("b", 1)]),
        ("10.0.0.1:8", [Host("10.0.0.1", 8)]),
        ("", []),
    ],
)
def test_host_list(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize("text", ["a:", "a:two", ":2", "a:0", "a:-1", "a:2:3"])
def test_a_host_that_cannot_be_read_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match=f"cannot read host '{text}'; expected NAME or NAME:SLOTS"):
        parse_hosts(f"ok:1,{text}")


def test_host_file() -> None:
    text = "# the cluster\na slots=2\n\nb:4  # fast\nc max_slots=9 slots=3\nd\n"
    assert parse_hostfile(text) == [Host("a", 2), Host("b", 4), Host("c", 3), Host("d", 1)]


def test_a_wrong_line_of_a_host_file_is_numbered() -> None:
    with pytest.raises(ValueError, match="host file, line 2: cannot read host 'b:x'"):
        parse_hostfile("a\nb slots=x\n")
