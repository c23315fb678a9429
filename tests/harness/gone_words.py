"""Finds test files that expect words which recent commits have removed from the package."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

__all__ = ["expected_words", "git", "gone_words"]

WITHIN = 200
"""Commits whose changes count: a few landings. All tenths have run since the commits before."""
_PACKAGE = ("ring_notebook", "native")
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
_SPLIT = re.compile(r'"\s*\n\s*[fr]*"')  # a literal on two lines
_VALUES = re.compile(r"\{[^{}]*\}|\\[a-zA-Z]")  # of f-strings, and classes of regular expressions


def git(folder: Path, *arguments: str) -> str:
    """What git prints in this folder."""
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


def expected_words(source: str) -> set[str]:
    """Each three words in a row of a literal, without values, digits and signs; docstrings are left out."""
    found = set()
    for line in _SPLIT.sub("", source).splitlines():
        for literal in _LITERAL.findall(line) if '"""' not in line else ():
            words = re.findall(r"[A-Za-z]{2,}", _VALUES.sub(" ", literal))
            found.update(" ".join(words[at : at + 3]) for at in range(len(words) - 2))
    return found


def gone_words(root: Path) -> set[str]:
    """Words that lines of the package have lost, and no line has now."""
    oldest = git(root, "rev-list", f"--max-count={WITHIN}", "HEAD").split()[-1]
    changes = git(root, "diff", "--unified=0", oldest, "HEAD", "--", *_PACKAGE).splitlines()
    lost = "\n".join(line[1:] for line in changes if line.startswith("-") and not line.startswith("--- "))
    files = [file for room in _PACKAGE for end in ("py", "?pp", "js") for file in (root / room).rglob(f"*.{end}")]
    return expected_words(lost).difference(*(expected_words(file.read_text()) for file in files))
