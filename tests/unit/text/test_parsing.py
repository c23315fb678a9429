"""Threads that parse at once, as the panel of a run in the background and the next cell do."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

import ring_notebook
from ring_notebook.text.parsing import parse

TEXT = "\n".join(f"x{line} = [f(a, b=(1 + (2 * (3 - 4)))) for a in range({line}) if a]" for line in range(40))


class _InCycle:
    """Garbage whose collection runs Python, so that another thread may get its turn in the middle of a tree."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        sum(range(5))


@pytest.fixture
def _many_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def _parse_at(depth: int) -> ast.Module:
    return parse(TEXT) if depth == 0 else _parse_at(depth - 1)


@pytest.mark.usefixtures("_many_switches")
def test_threads_parse_at_once() -> None:
    """Without its lock and its repetition 20 to 100 of these calls raise SystemError in Python 3.11."""
    failed: list[Exception] = []

    def work(depth: int) -> None:
        for _ in range(100):
            for _ in range(20):
                _InCycle()
            try:
                assert len(_parse_at(depth).body) == 40
            except Exception as error:
                failed.append(error)

    threads = [Thread(target=work, args=(depth,)) for depth in (5, 60, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_wrong_text_names_its_file() -> None:
    with pytest.raises(SyntaxError) as raised:
        parse("x = (", "<cell>")
    assert raised.value.filename == "<cell>"


def test_all_of_the_package_parses_so() -> None:
    package = Path(ring_notebook.__file__).parent
    others = [path for path in package.rglob("*.py") if "ast.parse(" in path.read_text(encoding="utf-8")]
    assert [path.name for path in others] == ["parsing.py"]
