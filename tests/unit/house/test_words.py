"""Words: those of our own are few and explained; identifiers have the field's word where it has one."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MOST = 25
# What we called things once, and what they are called.
GONE = {
    "domain": "ring memory",
    "doubts": "disruptions",
    "flight": "under way",
    "letter": "envelope",
    "seat": "member",
}
GONE |= {f"{word}s": instead for word, instead in GONE.items()}
# Data in flight is on its way, for everybody; the recorder is PyTorch's.
OF_THE_FIELD = re.compile(r"in flight|flight recorder")
_NAME = re.compile(r"[A-Za-z_]\w*")
_BESIDE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)  # comments and texts


def words_of(name: str) -> str:
    """``in_flight``, ``InFlight`` and ``kInFlight`` as ``in flight``."""
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name.removeprefix("k"))).lower()


def identifiers(path: str, text: str) -> Iterator[str]:
    """The names in the text of a file of Python or C++."""
    if path.endswith((".py", ".pyi")):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        yield from (token.string for token in tokens if token.type == tokenize.NAME)
    else:
        yield from _NAME.findall(_BESIDE.sub(" ", text))


def gone(path: str, text: str) -> list[str]:
    """The names in it that have a word of `GONE`."""
    if not any(word in text.lower() for word in GONE):  # most files, which need not be parsed
        return []
    found = {name: OF_THE_FIELD.sub("", words_of(name)).split() for name in set(identifiers(path, text))}
    return sorted(f"{path}: {name}" for name, words in found.items() if not GONE.keys().isdisjoint(words))


def test_identifiers_have_the_words_of_the_field() -> None:
    files = [path for path in (ROOT / "ring_notebook").rglob("*.py*") if path.suffix in {".py", ".pyi"}]
    files += [path for part in ("bindings", "include", "src") for path in (ROOT / "native" / part).rglob("*.?pp")]
    assert [name for path in files for name in gone(str(path.relative_to(ROOT)), path.read_text())] == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("core/place.py", "self._domains = domains"),
        ("torch/optimizer.py", "class _Flight: ..."),
        ("src/messages.cpp", "constexpr std::size_t kMostLetters = 1;"),
        ("include/ring/memory.hpp", "class Domain {};"),
    ],
)
def test_a_word_that_is_gone_is_noticed(path: str, line: str) -> None:
    assert gone(path, f"{line}\n")


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("core/calls.py", "in_flight = 1  # no letter, no domain"),
        ("src/fabric.cpp", 'kInFlight = 4;  // a domain, "a seat"'),
        ("torch/group.py", "_keep_flight_recorder_out()"),
    ],
)
def test_words_of_the_field_stay(path: str, line: str) -> None:
    assert gone(path, f"{line}\n") == []


def test_words_of_our_own_are_few() -> None:
    """Each has its line in one of the two glossaries, and no word has two."""
    architecture, core = ((ROOT / "docs" / name).read_text() for name in ("architecture.md", "core.md"))
    words = re.findall(r"^- \*\*(.+?)\*\*:", architecture.partition("## Words")[2].partition("\n## ")[0], re.MULTILINE)
    table = core.partition("## Words")[2].partition("\n## ")[0]
    words += re.findall(r"^\| ([a-z][^|]*?) \|", table, re.MULTILINE)
    assert len(words) == len(set(words)) <= MOST, words
