"""The house of the native core: includes go down only, and nothing in it reads the environment."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[3] / "native"
# Each room and the rooms below it that it may include.
BELOW_COLLECTIVES = {"group", "transport", "kernels", "device", "memory", "base"}
MAY_INCLUDE = {
    "base": set(),
    "memory": {"base"},
    "group": {"memory", "base"},
    "transport": {"memory", "base"},
    "kernels": {"memory", "base"},
    "device": {"base"},
    "foreign": set(),
    "plugins": {"foreign"},
    "collectives/host": BELOW_COLLECTIVES,
    "collectives/inter_host": {"collectives/host", *BELOW_COLLECTIVES},
    "collectives/device": {"collectives/inter_host", "collectives/host", *BELOW_COLLECTIVES},
    "collectives": {"collectives/device", "collectives/inter_host", "collectives/host", *BELOW_COLLECTIVES},
    "messages": {"collectives/inter_host", "collectives/host", *BELOW_COLLECTIVES},
    "communicator": {
        *("messages", "collectives", "collectives/device", "collectives/inter_host", "collectives/host"),
        *BELOW_COLLECTIVES,
    },
}
FILES = sorted(path for path in NATIVE.rglob("*") if path.suffix in {".cpp", ".hpp"})
# No test sets what the environment may hold, and the core of one process has one user.
ENVIRONMENT = re.compile(r"\b(secure_)?getenv\b|\bsetenv\b|\bputenv\b|\benviron\b")


def room_of(path: str) -> str:
    """The room of a file, by its path below native/. Some rooms are one, whatever the folders of their parts."""
    room = str(Path(path.removeprefix("src/").removeprefix("include/ring/")).parent)
    top, _, _ = room.partition("/")
    return top if top in {"communicator", "bindings", "tests"} else room


def included(text: str) -> list[str]:
    """The files of the core that the text includes, by their paths below their rooms' root."""
    names = re.findall(r'^#include "([^"]+)"', text, re.MULTILINE)
    return [name.removeprefix("ring/") for name in names if "/" in name]


def violations(path: str, text: str) -> list[str]:
    """What the file at ``path`` below native/ includes and may not; bindings and tests stand above all rooms."""
    room = room_of(path)
    if room in {"bindings", "tests"}:
        return []
    allowed = {room, *MAY_INCLUDE[room]}
    return [f"{path} includes {name}" for name in included(text) if room_of(name) not in allowed]


def test_includes_go_down_only() -> None:
    texts = {str(path.relative_to(NATIVE)): path.read_text() for path in FILES}
    assert [line for path, text in texts.items() for line in violations(path, text)] == []


def test_rooms_lie_above_one_another() -> None:
    TopologicalSorter(MAY_INCLUDE).prepare()  # raises CycleError


def test_every_room_is_known() -> None:
    rooms = {room_of(str(path.relative_to(NATIVE))) for path in FILES}
    assert rooms == {*MAY_INCLUDE, "bindings", "tests"}


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("src/base/wait.cpp", '#include "ring/memory/memory.hpp"'),
        ("include/ring/group/header.hpp", '#include "ring/kernels/kernels.hpp"'),
        ("src/transport/link_mpi.cpp", '#include "ring/group/host_group.hpp"'),
        ("src/collectives/host/host_reduction.cpp", '#include "collectives/inter_host/fabric_parts.hpp"'),
        ("src/collectives/inter_host/fabric.cpp", '#include "ring/collectives/paths.hpp"'),
        ("src/collectives/paths.cpp", '#include "ring/communicator/communicator.hpp"'),
    ],
)
def test_a_wrong_include_is_noticed(path: str, line: str) -> None:
    assert violations(path, f"#include <vector>\n{line}\n")


def test_the_core_reads_no_environment() -> None:
    """Settings come from ring_notebook/config.py; the tests in C++ take theirs as arguments."""
    readers = [str(path.relative_to(NATIVE)) for path in FILES if ENVIRONMENT.search(path.read_text())]
    assert readers == []
    assert ENVIRONMENT.search('std::getenv("RING_SPIN")')


def test_an_epoch_is_a_pass_over_data() -> None:
    """So the core, which knows no data, has none; a communicator has a generation."""
    assert [path.name for path in FILES if "epoch" in path.read_text().lower()] == []
