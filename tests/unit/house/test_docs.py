"""What the documents promise exists: make targets, files, settings."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from ring_notebook.config import Config

ROOT = Path(__file__).parents[3]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
# Read while the package is installed and while its pictures are taken, not by a process that uses it.
OTHERS = {"RING_PICTURES", "RING_SITE_MPI"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / ".ci" / "run"], ids=name_of)
def test_make_targets_exist(path: Path) -> None:
    text = path.read_text()
    named = set(re.findall(r"(?:`| {4}|^)make ([a-z][a-z-]*)", text, re.MULTILINE))
    assert named <= TARGETS


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_settings_exist(path: Path) -> None:
    known = {f"RING_{field.name.upper()}" for field in fields(Config)} | OTHERS
    assert set(re.findall(r"\bRING_[A-Z_]+\b", path.read_text())) <= known


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_folders_and_files_in_code_font_exist(path: Path) -> None:
    named = re.findall(r"`((?:[a-z_0-9]+/)+[A-Za-z_0-9.]*)`", path.read_text())
    missing = [name for name in named if not (ROOT / name).exists() and not (ROOT / "ring_notebook" / name).exists()]
    assert [name for name in missing if not (ROOT / "tests" / name).exists()] == []


def test_every_target_is_explained_by_make() -> None:
    text = (ROOT / "Makefile").read_text()
    explained = set(re.findall(r"echo 'make ([a-z-]+)", text))
    assert explained == TARGETS - {"help"}
