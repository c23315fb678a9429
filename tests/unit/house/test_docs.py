"""What the documents promise exists: make targets, files, settings."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

from ring_notebook.config import Config
from ring_notebook.rank.rendezvous import JOB

ROOT = Path(__file__).parents[3]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
# Read while the pictures of the package are taken, not by a process that uses it; and one of an earlier version.
OTHERS = {"RING_PICTURES", "RING_SITE_MPI"}


def offenders(documents: list[Path], unknown: Callable[[Path], Iterable[str]]) -> dict[str, list[str]]:
    """By document, what it names and does not exist."""
    found = {str(path.relative_to(ROOT)): sorted(unknown(path)) for path in documents}
    return {name: names for name, names in found.items() if names}


def test_make_targets_exist() -> None:
    def unknown(path: Path) -> set[str]:
        return set(re.findall(r"(?:`| {4}|^)make ([a-z][a-z-]*)", path.read_text(), re.MULTILINE)) - TARGETS

    assert offenders([*DOCUMENTS, ROOT / ".ci" / "run"], unknown) == {}


def test_links_lead_somewhere() -> None:
    def unknown(path: Path) -> list[str]:
        targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text())
        return [target for target in targets if not (path.parent / target).exists()]

    assert offenders(DOCUMENTS, unknown) == {}


def test_settings_exist() -> None:
    known = {f"RING_{field.name.upper()}" for field in fields(Config)} | OTHERS | set(JOB)
    assert offenders(DOCUMENTS, lambda path: set(re.findall(r"\bRING_[A-Z_]+\b", path.read_text())) - known) == {}


def test_folders_and_files_in_code_font_exist() -> None:
    def unknown(path: Path) -> list[str]:
        named = re.findall(r"`((?:[a-z_0-9]+/)+[A-Za-z_0-9.]*)`", path.read_text())
        places = (ROOT, ROOT / "ring_notebook", ROOT / "tests")
        return [name for name in named if not any((place / name).exists() for place in places)]

    assert offenders([ROOT / "README.md", ROOT / "CONTRIBUTING.md"], unknown) == {}


def test_every_target_is_explained_by_make() -> None:
    text = (ROOT / "Makefile").read_text()
    explained = set(re.findall(r"echo 'make ([a-z-]+)", text))
    assert explained == TARGETS - {"help"}


def test_the_page_of_settings_is_that_of_the_source() -> None:
    """``python docs/settings_page.py`` writes it."""
    written = runpy.run_path(str(ROOT / "docs" / "settings_page.py"))
    assert written["PAGE"].read_text() == written["render"]()
