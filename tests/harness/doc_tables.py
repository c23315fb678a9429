"""Reads tables of the documentation, for tests of what they say."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["table"]

_DOCS = Path(__file__).parents[2] / "docs"


def table(page: str, first: str) -> list[list[str]]:
    """The rows, without the head, of the table of ``docs/page`` whose head begins with the cells ``first``."""
    found = re.search(rf"^{re.escape(first)}.*\n\|[-|]+\n((?:\|.*\n)+)", (_DOCS / page).read_text(), re.MULTILINE)
    assert found is not None, f"docs/{page} has no table that begins with {first}"
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in found[1].splitlines()]
